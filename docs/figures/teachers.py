"""Draws the picture of docs/teachers.md: for each need the kind of teacher, who computes it, and what its answers are.

uv run docs/figures/teachers.py       # writes docs/images/teachers.svg; --format png
"""

from dataclasses import dataclass

from colours import INK, MUTED, OTHER, PLAIN, STUDENT, TEACHER, picture_parser, save
from matplotlib.figure import Figure
from overview import Canvas

WIDTH, HEIGHT = 830, 358
ROW = 58
"""Pixels from one kind of teacher to the next."""


@dataclass(frozen=True)
class Kind:
    need: tuple[str, str]
    title: str
    computed: str
    is_student: bool = False


KINDS = (
    Kind(("a better model", "that fits the machine"), "model: …", "processes of its own; FSDP2, tp"),
    Kind(("a better model, larger", "than all GPUs together"), "offload: layers", "layers from main memory, in turn"),
    Kind(
        ("no other model: the student", "where it reads more, or its past"),
        "weights: student | ema",
        "the student's own processes",
        True,
    ),
    Kind(("the same texts in", "every epoch and run"), "type: cached", "read from a folder, asked once"),
    Kind(("a model that others serve,", "for several runs"), "type: served", "vLLM, SGLang, on any machine"),
)
CACHED, SERVED = 3, 4


def draw() -> Figure:
    canvas = Canvas(WIDTH, HEIGHT)
    middle = [HEIGHT - 66 - ROW * n for n in range(len(KINDS))]
    for x, title in ((12, "what is needed"), (212, "what to write, and who computes"), (532, "what the losses read")):
        canvas.text(x, HEIGHT - 18, title, size=9, ha="left")
    for kind, y in zip(KINDS, middle, strict=True):
        for line, offset in zip(kind.need, (7, -8), strict=True):
            canvas.text(12, y + offset, line, size=8.6, ha="left")
        canvas.box(212, y - 23, 236, 46, STUDENT if kind.is_student else TEACHER, kind.title, kind.computed)
    canvas.box(
        532,
        middle[2] - 23,
        180,
        middle[0] - middle[2] + 46,
        PLAIN,
        "hidden states, head",
        "the whole distribution:",
        "exact, every loss",
    )
    canvas.box(
        532,
        middle[4] - 23,
        180,
        middle[3] - middle[4] + 46,
        PLAIN,
        "k likeliest tokens",
        "the token that came,",
        "mass of the others:",
        "most losses",
    )
    for n, y in enumerate(middle):
        canvas.arrow((448, y), (532, y), color=INK, width=1.8)
        if n == CACHED:
            canvas.arrow((490, y), (490, middle[2] - 12), (532, middle[2] - 12), color=INK, width=1.8)
    canvas.box(752, middle[4] - 23, 68, middle[0] - middle[4] + 46, OTHER, "loss")
    for y in (middle[1], (middle[3] + middle[4]) / 2):
        canvas.arrow((712, y), (752, y))
    canvas.text(212, 14, "any of them with another prompt than the student's: context", color=MUTED, ha="left")
    return canvas.figure


def main() -> None:
    options = picture_parser(__doc__).parse_args()
    save(draw(), options.output / f"teachers.{options.format}", dpi=96)


if __name__ == "__main__":
    main()
