"""Colours of the pictures, each with its counterpart on a dark page, and SVGs that have both.

A page shows such a file as a picture (`<img>`); the browser takes the colours of the page's `color-scheme`, or where it
does not know that of an embedded picture, those of the reader's system. Other programs show the light ones.
"""

import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

IMAGES = Path(__file__).resolve().parents[1] / "images"

PAPER = "#ffffff"
INK, MUTED, LINE = "#1f2933", "#52606d", "#7b8794"
STUDENT, TEACHER, PLAIN, OTHER = "#dbe8f8", "#dcf1e2", "#eef1f4", "#fdecd2"
"""Fills of boxes: what is the student's, a teacher's, neither's (special tokens, tools), anything else's (losses)."""
STUDENT_BAR, TEACHER_BAR = "#5b8fd0", "#55a776"
ONE_TO_ONE, MANY, INEXACT, ROLE = "#9db8d9", "#f2b35d", "#d64545", "#9aa5b1"
"""Chunks of one token a side, of several, of other bytes, and special tokens that are paired by role."""
SAMPLED, MASK = "#9fd3b6", "#2f855a"

DARK = {
    PAPER: "#10151c",
    INK: "#e6edf3",
    MUTED: "#a3adb9",
    LINE: "#768390",
    STUDENT: "#1b3a5c",
    TEACHER: "#1d4430",
    PLAIN: "#262d36",
    OTHER: "#4d3a17",
    STUDENT_BAR: "#4d86cc",
    TEACHER_BAR: "#3f8f60",
    ONE_TO_ONE: "#3f6ea5",
    MANY: "#b9812f",
    INEXACT: "#e0666a",
    ROLE: "#6b7682",
    SAMPLED: "#2b6e4d",
    MASK: "#4fb286",
}
mpl.rcParams.update(
    dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
)


def picture_parser(description: str | None) -> ArgumentParser:
    """Return the options of a script that draws pictures: the folder, and their format."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=IMAGES, metavar="FOLDER")
    parser.add_argument("--format", choices=("svg", "png"), default="svg", help="png: to look at the pictures")
    return parser


def save(figure: Figure, file: Path, *, dpi: float = 72) -> None:
    """Write a figure on an opaque background: an SVG with both sets of colours, anything else with the light ones.

    Raises ValueError for a colour that has no counterpart.
    """
    if file.suffix != ".svg":
        figure.savefig(file, dpi=dpi, facecolor=PAPER)
        return
    with mpl.rc_context({"svg.hashsalt": "nemo_opd"}):  # ids of the drawing's parts that do not change with each run
        figure.savefig(file, facecolor=PAPER, metadata={"Date": None})
    file.write_text(in_both(file.read_text(encoding="utf-8")), encoding="utf-8")


def in_both(svg: str) -> str:
    """Return an SVG of matplotlib's with rules for dark pages. Raises ValueError where a colour has no counterpart."""
    used = sorted(set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", svg)))
    if unknown := set(used) - DARK.keys():
        raise ValueError(f"colours without a counterpart on a dark page: {', '.join(sorted(unknown))}")
    rules = [f'[style*="{kind}: {at}"]{{{kind}:{DARK[at]}!important}}' for kind in ("fill", "stroke") for at in used]
    style = f"<style>@media(prefers-color-scheme:dark){{{''.join(rules)}}}</style>\n"
    head = re.search(r"<svg[^>]*>\n", svg)
    assert head is not None
    return svg[: head.end()] + style + svg[head.end() :]
