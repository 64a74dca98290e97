"""Draws the pictures of docs/projection.md from the projection of the demo tokenizers.

uv run docs/figures/projection.py     # writes docs/images/projection_{rows,prefix}.svg and projection_heat_map.png
"""

from collections.abc import Sequence
from dataclasses import dataclass

from colours import INK, MANY, MUTED, ONE_TO_ONE, PAPER, PLAIN, STUDENT, TEACHER, picture_parser, save
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path as Curve
from transformers import PreTrainedTokenizerFast

from nemo_opd.alignment import pieces_of
from nemo_opd.models.load import load_tokenizer
from nemo_opd.projection import ProjectionMatrix, build_projection
from nemo_opd.projection.display import plot_samples, samples

STUDENT_ROWS = (" return", " self", "64", "885", "11", "    ", b"\xe2\x80", "<|end_of_text|>")
"""Student tokens whose rows are drawn: words, numerals, white space, half a character, a special token."""
TEACHER_TOKENS = (" call", " callback", " callable", "classes", "classmethod", " Returns", "’")
"""Teacher tokens that are drawn with their longest prefix; the student has the first alone."""
LABELS = "DejaVu Sans"
BOX, STEP, ROOM = 0.62, 1.0, 9.0
"""Height of a box, distance of two boxes, space between the columns, in text heights."""


@dataclass(frozen=True)
class Link:
    left: int
    right: int
    weight: float
    exact: bool
    text: str = ""


@dataclass(frozen=True)
class Column:
    title: str
    labels: Sequence[str]
    colour: str
    heights: Sequence[float]
    """The middle of each box."""


def shown(tokenizer: PreTrainedTokenizerFast, token_id: int) -> str:
    """Text with visible white space, bytes in hexadecimal, special tokens by name."""
    piece = pieces_of(tokenizer).bytes_of(token_id)
    try:
        text = piece.decode() if piece else str(tokenizer.convert_ids_to_tokens(token_id))
    except UnicodeDecodeError:
        return " ".join(f"{byte:02X}" for byte in piece)
    return text.replace(" ", "·").replace("\n", "↵")


def id_of(tokenizer: PreTrainedTokenizerFast, token: str | bytes) -> int:
    if token in tokenizer.all_special_tokens:
        return int(tokenizer.convert_tokens_to_ids(token))
    piece = token if isinstance(token, bytes) else token.encode()
    return pieces_of(tokenizer).as_list().index(piece)


def draw(left: Column, right: Column, links: Sequence[Link]) -> Figure:
    """Two columns of boxes and bands between them, as wide as their weight."""
    widths = [0.62 * max(map(len, column.labels)) + 1.2 for column in (left, right)]
    height = max(*left.heights, *right.heights) + 1.0
    figure = Figure(figsize=(0.2 * (sum(widths) + ROOM) + 0.2, 0.36 * (height + 1.6)))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-widths[0] - 0.5, ROOM + widths[1] + 0.5), ylim=(height, -1.6))
    axes.axis("off")
    for link in sorted(links, key=lambda link: link.weight):
        band(axes, left.heights[link.left], right.heights[link.right], link)
    boxes(axes, left, -widths[0], widths[0])
    boxes(axes, right, ROOM, widths[1])
    return figure


def boxes(axes: Axes, column: Column, x: float, width: float) -> None:
    axes.text(x + width / 2, -1.0, column.title, ha="center", va="center", fontsize=10, family=LABELS, color=MUTED)
    for text, y in zip(column.labels, column.heights, strict=True):
        colour = PLAIN if text.startswith("<|") else column.colour
        style = "round,pad=0,rounding_size=0.18"
        box = FancyBboxPatch((x, y - BOX / 2), width, BOX, style, facecolor=colour, edgecolor="none")
        box.set_mutation_aspect(0.6)
        axes.add_patch(box)
        axes.text(x + width / 2, y, text, ha="center", va="center", fontsize=9.5, family="DejaVu Sans Mono", color=INK)


def band(axes: Axes, start: float, end: float, link: Link) -> None:
    bend = ROOM * 0.5
    curve = Curve([(0, start), (bend, start), (ROOM - bend, end), (ROOM, end)], [Curve.MOVETO] + [Curve.CURVE4] * 3)
    colour = ONE_TO_ONE if link.exact else MANY
    width = 1.0 + 9.0 * link.weight
    axes.add_patch(PathPatch(curve, facecolor="none", edgecolor=colour, linewidth=width, alpha=0.85, capstyle="butt"))
    if link.text:
        x, y = ROOM - 1.15, start + (end - start) * 0.965
        place = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8} if link.weight < 0.3 else None
        axes.text(x, y, link.text, ha="center", va="center", fontsize=8, family=LABELS, color=INK, bbox=place)


def spaced(count: int, over: int) -> list[float]:
    """Heights of `count` boxes beside a column of `over`."""
    step = STEP * max(1.0, (over - 1) / max(1, count - 1)) if count > 1 else STEP
    return [i * step for i in range(count)]


def rows_figure(matrix: ProjectionMatrix, student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast) -> Figure:
    ids = [id_of(student, token) for token in STUDENT_ROWS]
    entries = [
        [(int(t), float(w)) for t, w in zip(matrix.indices[i], matrix.weights[i], strict=True) if t >= 0] for i in ids
    ]
    targets = list(dict.fromkeys(t for row in entries for t, _ in row))
    links = [
        Link(i, targets.index(t), weight, bool(matrix.exact[ids[i]]), f"{weight:.2g}")
        for i, row in enumerate(entries)
        for t, weight in row
    ]
    left = Column("student", [shown(student, i) for i in ids], STUDENT, spaced(len(ids), len(targets)))
    right = Column("teacher", [shown(teacher, t) for t in targets], TEACHER, spaced(len(targets), len(ids)))
    return draw(left, right, links)


def prefix_figure(
    matrix: ProjectionMatrix, student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast
) -> Figure:
    ids = [id_of(teacher, token) for token in TEACHER_TOKENS]
    assert matrix.byte_prefix is not None, "build_projection makes it"
    found = matrix.byte_prefix[ids].tolist()
    targets = list(dict.fromkeys(found))
    links = [
        Link(i, targets.index(s), 0.6, shown(teacher, t) == shown(student, s))
        for i, (t, s) in enumerate(zip(ids, found, strict=True))
    ]
    left = Column("teacher", [shown(teacher, t) for t in ids], TEACHER, spaced(len(ids), len(targets)))
    right = Column("student", [shown(student, s) for s in targets], STUDENT, spaced(len(targets), len(ids)))
    return draw(left, right, links)


def main() -> None:
    arguments = picture_parser(__doc__).parse_args()
    names = ("demo:student", "demo:teacher_cross")
    student, teacher = (load_tokenizer(name, key="demo") for name in names)
    matrix = build_projection(student, teacher)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, figure in (
        ("rows", rows_figure(matrix, student, teacher)),
        ("prefix", prefix_figure(matrix, student, teacher)),
    ):
        save(figure, arguments.output / f"projection_{name}.{arguments.format}", dpi=150)
    title = f"{' → '.join(names)}   {matrix.student_vocab_size:,} × {matrix.teacher_vocab_size:,}"
    plot_samples(samples(matrix, student, teacher), arguments.output / "projection_heat_map.png", title)


if __name__ == "__main__":
    main()
