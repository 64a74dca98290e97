"""Draws the picture of the README: a step from texts to the student's update, and a real alignment and projection.

uv run docs/figures/overview.py       # writes docs/images/overview.svg; --format png
"""

from collections.abc import Sequence

import numpy as np
from colours import INK, LINE, MANY, MUTED, ONE_TO_ONE, OTHER, PLAIN, STUDENT, TEACHER, picture_parser, save
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, PathPatch, Polygon
from matplotlib.path import Path as Curve
from projection import shown
from transformers import PreTrainedTokenizerFast

from nemo_opd.alignment import TokenAligner, pieces_of
from nemo_opd.models.load import load_tokenizer
from nemo_opd.projection import build_projection

WIDTH, HEIGHT = 830, 424
"""Pixels of the picture, which are its units; GitHub's column is as wide."""
TEXT = "The archive cost about 1250 € in 1987"
PROJECTED = (" self", "64", "885")
"""Student tokens whose rows of the projection are drawn."""
TOKEN = 22
"""Height of a token's box."""
Point = tuple[float, float]


class Canvas:
    """Boxes, arrows and text in pixels from the lower left corner."""

    def __init__(self, width: float = WIDTH, height: float = HEIGHT) -> None:
        self.figure = Figure(figsize=(width / 96, height / 96))
        FigureCanvasAgg(self.figure)
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(0, height))
        self.axes.axis("off")

    def box(self, x: float, y: float, width: float, height: float, color: str, title: str, *lines: str) -> None:
        shape = f"round,pad=0,rounding_size={min(7, height / 4)}"
        self.axes.add_patch(
            FancyBboxPatch((x, y), width, height, shape, facecolor=color, edgecolor=LINE, linewidth=0.8)
        )
        top = y + height / 2 + 7.5 * len(lines)
        self.text(x + width / 2, top, title, size=9.6)
        for n, line in enumerate(lines, 1):
            self.text(x + width / 2, top - 15 * n, line, size=8.2, color=MUTED)

    def text(self, x: float, y: float, text: str, *, size: float = 8.2, color: str = "", **kwargs: object) -> None:
        style = {"ha": "center", "va": "center", "fontsize": size, "color": color or INK} | kwargs
        self.axes.text(x, y, text, **style)

    def line(self, *points: Point) -> None:
        self.axes.plot(*zip(*points, strict=True), color=LINE, linewidth=1.3, solid_capstyle="round")

    def arrow(self, *points: Point, color: str = "", width: float = 1.3) -> None:
        """Draw straight lines through the points, with a head at the last."""
        line = Curve(points)
        self.axes.add_patch(
            FancyArrowPatch(
                path=line,
                arrowstyle="-|>",
                mutation_scale=10,
                color=color or LINE,
                linewidth=width,
                joinstyle="round",
                shrinkA=0,
                shrinkB=0,
            )
        )


def draw_step(canvas: Canvas) -> None:
    """From texts over teachers and student to the losses, and the weights back to the samples."""
    canvas.box(10, 350, 148, 50, PLAIN, "corpus", "texts, conversations")
    canvas.box(10, 226, 148, 50, PLAIN, "samples", "by the student itself")
    canvas.text(84, 313, "one, or a share of each", color=MUTED)
    canvas.box(206, 366, 160, 48, TEACHER, "teacher", "another tokenizer")
    canvas.box(206, 306, 160, 48, TEACHER, "teacher", "the student's tokenizer")
    canvas.text(286, 290, "any number; loaded, cached or served", size=7.4, color=MUTED)
    canvas.box(206, 226, 160, 50, STUDENT, "student", "FSDP2 × TP × CP")
    for y in (375, 251):
        canvas.line((158, y), (182, y))
    canvas.line((182, 251), (182, 390))
    for y in (390, 330, 251):
        canvas.arrow((182, y), (206, y))
    for y in (390, 330):
        canvas.arrow((366, y), (470, y), color=INK, width=2.4)
    canvas.text(416, 415, "hidden states")
    canvas.text(416, 401, "CUDA IPC")
    canvas.text(416, 318, "shared memory", size=7.4, color=MUTED)
    canvas.text(416, 306, "on CPUs", size=7.4, color=MUTED)
    canvas.box(470, 366, 164, 48, PLAIN, "alignment, projection", "chunks of equal bytes")
    canvas.box(470, 306, 164, 48, PLAIN, "token by token", "one vocabulary")
    canvas.box(672, 306, 148, 108, OTHER, "weighted losses", "of each teacher", "cross-entropy", "rewards")
    for y in (390, 330):
        canvas.arrow((634, y), (672, y))
    canvas.arrow((366, 262), (720, 262), (720, 306))
    canvas.text(540, 272, "hidden states; logits in blocks", color=MUTED)
    canvas.arrow((772, 306), (772, 240), (366, 240))
    canvas.text(540, 230, "gradient, one optimizer step", color=MUTED)
    canvas.arrow((286, 226), (286, 212), (84, 212), (84, 226))
    canvas.text(184, 203, "new weights", color=MUTED)


def draw_alignment(canvas: Canvas, student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast) -> None:
    """Two rows of tokens, the chunks that they share between them."""
    sides = [tokenizer(TEXT, add_special_tokens=False)["input_ids"] for tokenizer in (student, teacher)]
    alignment = TokenAligner(student, teacher).align(*sides)
    labels = [[shown(tokenizer, i) for i in ids] for tokenizer, ids in zip((student, teacher), sides, strict=True)]
    canvas.text(10, 170, "alignment: chunks of the same bytes", size=9, ha="left")
    for y, name in ((128, "student"), (64, "teacher")):
        canvas.text(10, y, name, color=MUTED, ha="left")
    left = 62.0
    for c, (i, k, j, m) in enumerate(alignment.bounds.tolist()):
        pair = labels[0][i:k], labels[1][j:m]
        room = max(sum(map(width, side)) for side in pair)
        for side, y, color in zip(pair, (128, 64), (STUDENT, TEACHER), strict=True):
            draw_tokens(canvas, side, left, y, room, color)
        color = ONE_TO_ONE if alignment.one_to_one[c] else MANY
        corners = [(left, 112), (left + room - 3, 112), (left + room - 3, 80), (left, 80)]
        canvas.axes.add_patch(Polygon(corners, facecolor=color, alpha=0.55, edgecolor="none"))
        if not alignment.one_to_one[c]:
            canvas.text(left + room / 2, 96, f"{k - i}:{m - j}", size=8)
        left += room
    for x, color, text in ((62, ONE_TO_ONE, "token for token"), (190, MANY, "several tokens on a side")):
        canvas.axes.add_patch(Polygon([(x, 20), (x + 18, 20), (x + 18, 30), (x, 30)], facecolor=color, alpha=0.55))
        canvas.text(x + 24, 25, text, color=MUTED, ha="left")


def draw_tokens(canvas: Canvas, labels: Sequence[str], left: float, middle: float, room: float, color: str) -> None:
    """Boxes for the tokens of one side of a chunk, widened evenly to its width."""
    spare = (room - sum(map(width, labels))) / len(labels)
    for text in labels:
        wide = width(text) + spare
        token(canvas, left, middle, wide - 3, text, color)
        left += wide


def draw_projection(canvas: Canvas, student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast) -> None:
    """Rows of the sparse map from the student's vocabulary to the teacher's."""
    matrix = build_projection(student, teacher, top_k=4)
    canvas.text(640, 170, "projection: sparse, by row", size=9, ha="left")
    top = 148.0
    pieces = pieces_of(student).as_list()
    for text in PROJECTED:
        row = pieces.index(text.encode())
        kept = np.flatnonzero(matrix.indices[row] >= 0)
        middle = top - 13 * len(kept)
        token(canvas, 640, middle, 52, shown(student, row), STUDENT)
        for n, column in enumerate(kept.tolist()):
            y = top - 26 * n - 13
            weight = float(matrix.weights[row, column])
            band(canvas, (692, middle), (752, y), 12 * weight, ONE_TO_ONE if matrix.exact[row] else MANY)
            token(canvas, 752, y, 52, shown(teacher, int(matrix.indices[row, column])), TEACHER)
        top -= 26 * len(kept) + 8


def band(canvas: Canvas, start: Point, end: Point, thickness: float, color: str) -> None:
    middle = (start[0] + end[0]) / 2
    points = [start, (middle, start[1]), (middle, end[1]), end]
    path = Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
    canvas.axes.add_patch(PathPatch(path, facecolor="none", edgecolor=color, linewidth=max(1, thickness), alpha=0.75))


def token(canvas: Canvas, x: float, middle: float, wide: float, text: str, color: str) -> None:
    shape = "round,pad=0,rounding_size=3"
    corner = x, middle - TOKEN / 2
    canvas.axes.add_patch(FancyBboxPatch(corner, wide, TOKEN, shape, facecolor=color, edgecolor=LINE, linewidth=0.7))
    canvas.text(x + wide / 2, middle - 0.5, text, size=8.6, family="DejaVu Sans Mono", va="center_baseline")


def width(text: str) -> float:
    return 7.1 * len(text) + 10


def draw() -> Figure:
    canvas = Canvas()
    student, teacher = (load_tokenizer(f"demo:{name}", key=name) for name in ("student", "teacher_cross"))
    draw_step(canvas)
    draw_alignment(canvas, student, teacher)
    draw_projection(canvas, student, teacher)
    return canvas.figure


def main() -> None:
    options = picture_parser(__doc__).parse_args()
    save(draw(), options.output / f"overview.{options.format}", dpi=96)


if __name__ == "__main__":
    main()
