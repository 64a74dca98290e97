"""Draws the picture of docs/losses.md: a sentence in two tokenizers, and which probabilities each loss compares there.

uv run docs/figures/losses.py       # writes docs/images/losses.svg; --format png
"""

from collections.abc import Sequence

from colours import (
    INK,
    LINE,
    MANY,
    MUTED,
    ONE_TO_ONE,
    PLAIN,
    STUDENT,
    STUDENT_BAR,
    TEACHER,
    TEACHER_BAR,
    picture_parser,
    save,
)
from loss_cells import CHUNK, Cell, Comparison, Place, Rank, comparisons
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Polygon, Rectangle

WIDTH, COLUMNS = 840, 3
"""Pixels, which are the picture's units, and panels in a row."""
GAP, ROW = 14, 15
"""Space around a panel, and height of a line in it."""
EDGE = 8
"""Space to the left and right of all panels."""
TOP = 160
"""Height of the part above the panels."""
SHOWN = 7
"""Lines of a panel: the largest cells, and one for all others."""
FULL = 0.2
"""Mass of the longest bar; larger ones are cut off."""
BAR, NAME = 56, 40
"""Width of the longest bar, and half the space for the names between the bars."""


def token(axes: Axes, x: float, y: float, wide: float, text: str, color: str, *, bold: bool) -> None:
    shape = "round,pad=0,rounding_size=3"
    edge = {"edgecolor": INK, "linewidth": 1.8} if bold else {"edgecolor": LINE, "linewidth": 0.7}
    axes.add_patch(FancyBboxPatch((x, y - 11), wide, 22, shape, facecolor=color, **edge))
    write(axes, x + wide / 2, y - 0.5, text, size=8.6, family="DejaVu Sans Mono", va="center_baseline")


def write(axes: Axes, x: float, y: float, text: str, *, size: float = 8.0, color: str = INK, **more: str) -> None:
    axes.text(x, y, text, fontsize=size, color=color, **{"ha": "center", "va": "center", **more})


def draw_sentence(axes: Axes, at: Place, top: float) -> None:
    """Draw the end of the sentence as both sides cut it, with the chunk that the panels look at."""
    write(axes, 10, top - 16, "one sentence, two tokenizers, and the chunks of equal bytes", size=10, ha="left")
    upper, lower, x = top - 52, top - 112, 70.0
    for y, name in ((upper, "student"), (lower, "teacher")):
        write(axes, 10, y, name, color=MUTED, ha="left")
    looked_at = at.bounds(CHUNK)
    for i, k, j, m in at.alignment.bounds.tolist():
        sides = ((at.student, i, k, upper, STUDENT), (at.teacher, j, m, lower, TEACHER))
        labels = [[side.label(side.ids[n]) for n in range(a, b)] for side, a, b, _, _ in sides]
        room = max(sum(map(width, names)) for names in labels)
        is_it = (i, k, j, m) == looked_at
        for names, (*_, y, color) in zip(labels, sides, strict=True):
            left, spare = x, (room - sum(map(width, names))) / len(names)
            for name in names:
                token(axes, left, y, width(name) + spare - 3, name, color, bold=is_it)
                left += width(name) + spare
        color = ONE_TO_ONE if (k - i, m - j) == (1, 1) else MANY
        corners = [(x, upper - 15), (x + room - 3, upper - 15), (x + room - 3, lower + 15), (x, lower + 15)]
        axes.add_patch(Polygon(corners, facecolor=color, alpha=0.55, edgecolor="none"))
        if is_it:
            write(axes, x + room / 2, (upper + lower) / 2, f"{k - i}:{m - j}")
        x += room
    legend(axes, x + 24, top)


def legend(axes: Axes, x: float, top: float) -> None:
    """Explain the bars, which are of what follows the text before the chunk."""
    lines = ((STUDENT_BAR, "student's probability"), (TEACHER_BAR, "teacher's probability"))
    for n, (color, text) in enumerate((*lines, (MANY, "of it, moved there from other tokens"))):
        y = top - 46 - 17 * n
        axes.add_patch(Rectangle((x, y - 5), 18, 10, facecolor=color))
        write(axes, x + 26, y, text, color=MUTED, ha="left")
    write(axes, x, top - 104, "of what follows “A line is at most ”;", color=MUTED, ha="left")
    write(axes, x, top - 120, "loss of the chunk 100, forward KL", color=MUTED, ha="left")


def width(text: str) -> float:
    return 7.1 * len(text) + 12


def draw_panel(axes: Axes, left: float, top: float, wide: float, tall: float, found: Comparison) -> None:
    shape = "round,pad=0,rounding_size=6"
    axes.add_patch(FancyBboxPatch((left, top - tall), wide, tall, shape, facecolor=PLAIN, alpha=0.55, edgecolor="none"))
    write(axes, left + 10, top - 14, found.loss, size=9.6, ha="left", weight="bold")
    write(axes, left + 10, top - 30, found.how, color=MUTED, size=7.8, ha="left")
    if found.value is not None:
        write(
            axes,
            left + wide - 10,
            top - 14,
            f"{found.value:.2f} nats".replace("-", "−"),
            color=MUTED,
            size=7.8,
            ha="right",
        )
    middle, y = left + wide / 2, top - 52
    for line in lines_of(found):
        if isinstance(line, Rank):
            names = ((middle - NAME / 2, line.student_label, STUDENT), (middle + NAME / 2, line.teacher_label, TEACHER))
            for x, text, _ in names:
                name(axes, x, y, text)
        else:
            name(axes, middle, y, line.label)
        draw_bars(axes, middle, y, line, is_policy=found.loss == "grpo")
        y -= ROW
    if found.note:
        write(axes, middle, y - 3, found.note, size=7.4, color=MUTED)


def name(axes: Axes, x: float, y: float, text: str) -> None:
    family = "DejaVu Sans" if text in {"others", "unpaired", "no prefix"} else "DejaVu Sans Mono"
    write(axes, x, y, text, size=8.0, family=family)


def draw_bars(axes: Axes, middle: float, y: float, line: Cell | Rank, *, is_policy: bool) -> None:
    """The student's bar to the left, the teacher's to the right, the part that was moved at its end."""
    moved = (line.student_moved, line.teacher_moved) if isinstance(line, Cell) else (0.0, 0.0)
    sides = ((-1, line.student, moved[0], STUDENT_BAR), (1, line.teacher, moved[1], TEACHER_BAR))
    for sign, mass, part, color in sides:
        if is_policy and sign > 0:
            write(axes, middle + NAME + 4, y, "times advantage", size=7.4, color=MUTED, ha="left")
            continue
        start = middle + sign * NAME
        long, own = (BAR * min(1, each / FULL) for each in (mass, mass - part))
        for begin, end, fill in ((0.0, own, color), (own, long, MANY)):
            if end > begin:
                x = min(start + sign * begin, start + sign * end)
                axes.add_patch(Rectangle((x, y - 5), end - begin, 10, facecolor=fill))
        at = start + sign * (long + 3)
        write(axes, at, y, number(mass), size=7.2, color=MUTED, ha="left" if sign > 0 else "right")


def number(mass: float) -> str:
    return f"{mass:.2f}" if 0.0095 <= mass < 0.995 else f"{mass:.0f}" if mass in (0, 1) else f"{mass:.1g}"


def lines_of(found: Comparison) -> list[Cell | Rank]:
    """The largest cells and the first ranks, and what is left as one cell."""
    places = SHOWN - (4 if found.ranks and found.cells else 0)
    apart = [cell for cell in found.cells if cell.label in {"unpaired", "no prefix"}]
    cells = [cell for cell in found.cells if cell not in apart]
    if len(cells) > places:
        gets_most = max(cells, key=lambda cell: cell.student_moved + cell.teacher_moved)
        cells.sort(key=lambda cell: -max(cell.student, cell.teacher))
        if gets_most.student_moved + gets_most.teacher_moved > 0:
            cells.insert(min(cells.index(gets_most), places - 2), cells.pop(cells.index(gets_most)))
    lines: list[Cell | Rank] = list(cells[:places])
    if rest := cells[places:]:
        lines[-1:] = [summed([cells[places - 1], *rest])]
    if found.ranks:
        return [*lines, *apart, *found.ranks[: SHOWN - len(lines) - len(apart)]]
    return [*lines, *apart][:SHOWN]


def height_of(found: Comparison) -> float:
    return 52 + ROW * (len(lines_of(found)) + bool(found.note))


def summed(cells: Sequence[Cell]) -> Cell:
    return Cell(
        "others", *(sum(getattr(cell, name) for cell in cells) for name in Cell.__annotations__ if name != "label")
    )


def draw(at: Place) -> Figure:
    found = comparisons(at)
    rows = [found[n : n + COLUMNS] for n in range(0, len(found), COLUMNS)]
    heights = [max(map(height_of, row)) for row in rows]
    height = TOP + sum(heights) + len(rows) * GAP
    figure = Figure(figsize=((WIDTH + 2 * EDGE) / 96, height / 96))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-EDGE, WIDTH + EDGE), ylim=(0, height))
    axes.axis("off")
    draw_sentence(axes, at, height)
    wide, top = (WIDTH - (COLUMNS - 1) * GAP) / COLUMNS, height - TOP
    for row, tall in zip(rows, heights, strict=True):
        for column, comparison in enumerate(row):
            draw_panel(axes, column * (wide + GAP), top, wide, tall, comparison)
        top -= tall + GAP
    return figure


def main() -> None:
    options = picture_parser(__doc__).parse_args()
    save(draw(Place()), options.output / f"losses.{options.format}", dpi=96)


if __name__ == "__main__":
    main()
