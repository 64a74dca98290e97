"""Draws the picture of docs/losses.md that shows which of the student's tokens have a target.

uv run docs/figures/positions.py     # writes docs/images/positions.svg
"""

from dataclasses import dataclass

from colours import INK, MUTED, ONE_TO_ONE, PLAIN, STUDENT, TEACHER, picture_parser, save
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

LABELS, CODE = "DejaVu Sans", "DejaVu Sans Mono"
WIDTH, LABEL_WIDTH = 3.1, 1.7
"""Of a student token and of the labels, in inches."""


@dataclass(frozen=True)
class Place:
    """A student token."""

    text: str
    candidates: str
    """Teacher tokens that are compared there."""
    known: str
    """What the teacher knows about its word, by where its tokens begin."""
    is_start: bool


PLACES = (
    Place("·recogn", "all tokens,\nby their first piece", "nothing of the word yet", True),
    Place("ition", "tokens that begin with ·recogn\nand go on: ition, ize, izable", "the word goes on", False),
    Place("·of", "all tokens,\nby their first piece", "the word has ended", True),
)


def draw() -> Figure:
    width = WIDTH * len(PLACES) + LABEL_WIDTH
    figure = Figure(figsize=(width, 3.4))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-LABEL_WIDTH, WIDTH * len(PLACES)), ylim=(3.4, 0))
    axes.axis("off")
    rows = {
        0.35: "teacher",
        0.9: "student",
        1.45: "the teacher knows",
        2.0: "candidates",
        2.65: "positions=starts",
        3.05: "positions=all",
    }
    for y, label in rows.items():
        axes.text(0.1 - LABEL_WIDTH, y, label, va="center", fontsize=10, family=LABELS, color=MUTED)
    box(axes, 0, 2 * WIDTH, 0.35, "·recognition", TEACHER)
    box(axes, 2 * WIDTH, WIDTH, 0.35, "·of", TEACHER)
    for i, place in enumerate(PLACES):
        box(axes, i * WIDTH, WIDTH, 0.9, place.text, STUDENT)
        for y, text in ((1.45, place.known), (2.0, place.candidates)):
            middle = (i + 0.5) * WIDTH
            axes.text(middle, y, text, ha="center", va="center", fontsize=9.5, family=LABELS, color=INK)
        for y, has_target in ((2.65, place.is_start), (3.05, True)):
            label = "compared" if has_target else "no target"
            box(axes, i * WIDTH, WIDTH, y, label, ONE_TO_ONE if has_target else PLAIN, family=LABELS)
    return figure


def box(axes: Axes, x: float, width: float, y: float, text: str, colour: str, family: str = CODE) -> None:
    style = "round,pad=0,rounding_size=0.08"
    patch = FancyBboxPatch((x + 0.06, y - 0.16), width - 0.12, 0.32, style, facecolor=colour, edgecolor="none")
    axes.add_patch(patch)
    axes.text(x + width / 2, y, text, ha="center", va="center", fontsize=10, family=family, color=INK)


def main() -> None:
    arguments = picture_parser(__doc__).parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    save(draw(), arguments.output / f"positions.{arguments.format}", dpi=144)


if __name__ == "__main__":
    main()
