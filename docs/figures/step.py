"""Draws the picture of docs/performance.md: who computes when in a step, as two short runs of the demo were timed.

uv run docs/figures/step.py --record       # some minutes; writes docs/figures/step.json and docs/images/step.svg
uv run docs/figures/step.py                # draws what was recorded; --format png
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from colours import INEXACT, INK, MANY, MUTED, ONE_TO_ONE, PLAIN, ROLE, STUDENT_BAR, TEACHER_BAR, picture_parser, save
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nemo_opd.config.composition import compose
from nemo_opd.training import groups
from nemo_opd.training.off_policy import distil
from nemo_opd.types import Max, TokenRows
from nemo_opd.workers.step import Phases
from nemo_opd.workers.student_worker import StudentWorker
from nemo_opd.workers.teacher_worker import TeacherOutput, TeacherWorker

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_suffix(".json")
TRACE = "NEMO_OPD_TRACE"
"""Variable with the file that all processes of a run append to."""
PLACEMENTS = {
    "colocated": "cluster.placement=colocated: the teachers take turns, then the student",
    "separate": "cluster.placement=separate: the teachers read the next batch while the student trains",
}
SETTINGS = ("train.max_steps=8", "train.validate_every=null", "train.save_every=null", "evaluation=null")
FIRST, LAST = 4, 6
"""Steps that are drawn, counted from 0: a run's first ones are slower."""
LANES = {"cross": "teacher, another tokenizer", "same": "teacher, the student's", "student": "student"}
COLORS = {
    "handoff": MANY,
    "forward": ONE_TO_ONE,
    "loss": INEXACT,
    "backward": STUDENT_BAR,
    "optimizer": ROLE,
}
"""Of the student's phases, in their order."""
WIDTH, LEFT, LANE, PANEL = 830, 190, 30, 156
"""Pixels: of the picture, of the lanes' names, height of a lane, and of a panel."""


@dataclass(frozen=True)
class Span:
    lane: str
    phase: str
    step: int
    start: float
    """Seconds by a clock that all processes of a machine share."""
    end: float


def note(lane: str, step: int, spans: Sequence[tuple[str, float, float]]) -> None:
    with open(os.environ[TRACE], "a", encoding="utf-8") as file:
        file.writelines(json.dumps([lane, phase, step, start, end]) + "\n" for phase, start, end in spans)


class TracedPhases(Phases):
    steps = 0

    def take(self) -> dict[str, Max]:
        changes = list(self._changes)
        note("student", self.steps, [(name, start, end) for (name, start), (_, end) in pairwise(changes) if name])
        self.steps += 1
        return super().take()


class TracedStudent(StudentWorker):
    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.phases = TracedPhases(self.device)


class TracedTeacher(TeacherWorker):
    steps = 0

    def __init__(self, settings: Any, **more: Any) -> None:
        super().__init__(settings, **more)
        self.lane = settings.type.removesuffix("_tokenizer")

    def forward(self, tokens: TokenRows, micro_batches: Sequence[slice], slot: int = 0) -> TeacherOutput:
        start = time.perf_counter()
        found = super().forward(tokens, micro_batches, slot)
        note(self.lane, self.steps, [("forward", start, time.perf_counter())])
        self.steps += 1
        return found


def record() -> dict[str, list[list[Any]]]:
    """Run the demo in each placement and return the spans of the steps that are drawn."""
    groups.TeacherWorker, groups.StudentWorker = TracedTeacher, TracedStudent  # type: ignore[misc]
    found = {}
    for placement in PLACEMENTS:
        with TemporaryDirectory() as folder:
            os.environ[TRACE] = f"{folder}/trace"
            more = (*SETTINGS, f"cluster.placement={placement}", f"run.output_dir={folder}/run", "~data.validation")
            distil(compose(ROOT / "configs" / "off_policy_demo.yaml", more))
            rows = [json.loads(line) for line in Path(os.environ[TRACE]).read_text("utf-8").splitlines()]
        found[placement] = [row for row in rows if FIRST - 1 <= row[2] <= LAST + 1]
    return found


def draw(found: dict[str, list[list[Any]]]) -> Figure:
    height = PANEL * len(found) + 44
    figure = Figure(figsize=(WIDTH / 96, height / 96))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(0, height))
    axes.axis("off")
    spans = {name: [Span(*row) for row in rows] for name, rows in found.items()}
    for n, (name, of_run) in enumerate(spans.items()):
        draw_run(axes, height - n * PANEL, PLACEMENTS[name], of_run)
    x = LEFT
    for text, color in {"teacher's forward": TEACHER_BAR, **COLORS}.items():
        axes.add_patch(Rectangle((x, 15), 14, 12, facecolor=color))
        axes.text(x + 20, 21, text, fontsize=8.4, va="center", color=MUTED)
        x += 46 + 6.6 * len(text)
    return figure


def window(spans: Sequence[Span]) -> tuple[float, float]:
    """From the end of the student's step before the first to be drawn, to that of the last."""
    ends = [max(s.end for s in spans if (s.lane, s.step) == ("student", step)) for step in (FIRST - 1, LAST)]
    return ends[0], ends[1]


def draw_run(axes: Axes, top: float, title: str, spans: Sequence[Span]) -> None:
    """Draw the lanes of a run on a time scale of its own."""
    shown = window(spans)
    pixels = (WIDTH - LEFT - 20) / (shown[1] - shown[0])
    axes.text(10, top - 18, title, fontsize=9.6, va="center", color=INK)
    lanes = {lane: top - 48 - LANE * n for n, lane in enumerate(LANES)}
    for lane, y in lanes.items():
        axes.text(LEFT - 10, y, LANES[lane], fontsize=8.4, ha="right", va="center", color=MUTED)
        axes.add_patch(Rectangle((LEFT, y - 11), (shown[1] - shown[0]) * pixels, 22, facecolor=PLAIN))
    for span in spans:
        start, end = max(span.start, shown[0]), min(span.end, shown[1])
        if end <= start:
            continue
        x, y = LEFT + (start - shown[0]) * pixels, lanes[span.lane]
        color = COLORS[span.phase] if span.lane == "student" else TEACHER_BAR
        axes.add_patch(Rectangle((x, y - 11), (end - start) * pixels, 22, facecolor=color))
        if span.lane != "student" and (end - start) * pixels > 12:
            middle = x + (end - start) * pixels / 2
            axes.text(middle, y - 0.5, str(span.step), fontsize=8, ha="center", va="center", color=INK)
    below = lanes["student"] - 22
    for step in range(FIRST, LAST + 1):
        own = [span for span in spans if (span.lane, span.step) == ("student", step)]
        middle = (min(s.start for s in own) + max(s.end for s in own)) / 2
        x = LEFT + (middle - shown[0]) * pixels
        axes.text(x, below, f"step {step}", fontsize=8, ha="center", va="center", color=MUTED)
    length = f"{1000 * (shown[1] - shown[0]) / (LAST - FIRST + 1):.0f} ms a step"
    axes.text(WIDTH - 20, top - 18, length, fontsize=8.4, ha="right", va="center", color=MUTED)


def main() -> None:
    parser = picture_parser(__doc__)
    parser.add_argument("--record", action="store_true", help="run the demo twice for it")
    options = parser.parse_args()
    if options.record:
        RECORD.write_text(json.dumps(record(), indent=0), encoding="utf-8")
    save(draw(json.loads(RECORD.read_text(encoding="utf-8"))), options.output / f"step.{options.format}", dpi=96)


if __name__ == "__main__":
    main()
