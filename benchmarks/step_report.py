"""What `step.py` found, for people and as data."""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from alignment import Grid
from step_flops import StepWork
from step_gold import NOTES as GOLD_NOTES
from step_ours import MemoryFound

from nemo_opd.logging.metrics import shares, step_parts
from nemo_opd.preflight.flops import Flops

OURS, GOLD = "nemo_opd", "TRL GOLD"
TERA = 1e12
ESTIMATE_ERROR = 0.2
"""That the memory estimate promises not to exceed, as a share of what is measured."""


@dataclass(frozen=True)
class Way:
    """One trainer on one case."""

    name: str
    seconds: list[float]
    """Of each measured step, in the order of the rounds."""
    peak_gib: float
    """Ours: of the student's process alone. GOLD: of its only one."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Case:
    """A pair of models with a loss."""

    student: str
    teacher: str
    loss: str
    length: int
    """Tokens of a text, at most."""
    layout: str
    threads: int
    """Of each process."""
    work: StepWork
    """Of a middle step."""
    flops: dict[str, Flops]
    devices: int
    ours: Way
    gold: Way | None
    gold_is_missing: str
    """Why there is no GOLD; empty where there is."""
    records: list[dict[str, float]]
    """Ours, of each measured step."""
    memory: list[MemoryFound]
    load: tuple[float, float]
    """Of the machine, before and after: processes that wanted a core, on average over a minute."""

    @property
    def name(self) -> str:
        return f"{self.student} ← {self.teacher}, {self.length:,} tokens, {self.loss}"

    @property
    def total_flops(self) -> int:
        return sum(flops.total for flops in self.flops.values())

    def tokens_per_s(self, way: Way) -> float:
        return self.work.student_tokens / way.median_s

    def mfu(self, way: Way, peak: float) -> float:
        """Of all devices that took part: GOLD's is one."""
        devices = self.devices if way.name == OURS else 1
        return self.total_flops / (way.median_s * devices * peak)

    @property
    def ratio(self) -> float | None:
        """Ours / GOLD: the median over rounds."""
        if self.gold is None:
            return None
        return statistics.median(a / b for a, b in zip(self.ours.seconds, self.gold.seconds, strict=True))

    def summary(self, peak: float | None) -> dict[str, object]:
        """Speed and memory of each trainer, and how long a step of ours takes relative to GOLD's; peak: FLOP/s."""
        ways = [self.ours] if self.gold is None else [self.ours, self.gold]
        figures = {
            way.name: {
                "tokens/s": self.tokens_per_s(way),
                "MFU": None if peak is None else self.mfu(way, peak),
                "peak, GiB": way.peak_gib,
            }
            for way in ways
        }
        return {"case": self.name, **figures, "ours / GOLD": self.ratio}

    def parts(self) -> dict[str, float]:
        """Median seconds of our step's parts."""
        every = [step_parts(record) for record in self.records]
        return {part: statistics.median(parts[part] for parts in every) for part in every[0]}


@dataclass(frozen=True)
class Found:
    cases: list[Case]
    peak: float | None
    """FLOP/s of a device; None: no MFU."""
    facts: dict[str, str]


def grids(found: Found) -> list[Grid]:
    return [
        step_grid(found),
        breakdown_grid(found),
        Grid("Memory", ["models, texts and loss", "what", "measured, GiB", "estimated, GiB"], list(memory_rows(found))),
        Grid(
            "Work of a step (TFLOP)",
            ["models, texts and loss", "side", "tokens", "matrices", "head", "attention", "share"],
            list(work_rows(found)),
        ),
    ]


def step_grid(found: Found) -> Grid:
    rows = []
    for case in found.cases:
        for name, way in ((OURS, case.ours), (GOLD, case.gold)):
            if way is None:
                rows.append([case.name, name, f"not measured: {case.gold_is_missing}", *[""] * 5])
                continue
            mfu = "" if found.peak is None else f"{case.mfu(way, found.peak):.1%}"
            ratio = f"{case.ratio:.2f}" if case.ratio is not None and name == OURS else ""
            seconds = [f"{way.median_s:.2f}", f"{min(way.seconds):.2f}–{max(way.seconds):.2f}"]
            rows.append(
                [case.name, name, *seconds, f"{case.tokens_per_s(way):,.0f}", mfu, ratio, f"{way.peak_gib:.2f}"]
            )
    columns = ["models, texts and loss", "trainer", "step, s", "range", "tokens/s", "MFU", "ours / GOLD", "peak, GiB"]
    return Grid("Steps", columns, rows)


def breakdown_grid(found: Found) -> Grid:
    rows = []
    for case in found.cases:
        parts = case.parts()
        of_all = shares(parts)
        rows += [[case.name, part, f"{1e3 * seconds:,.1f}", f"{of_all[part]:.1%}"] for part, seconds in parts.items()]
    return Grid("Where our step's time goes", ["models, texts and loss", "part", "ms", "share"], rows)


def memory_rows(found: Found) -> Iterator[list[str]]:
    for case in found.cases:
        for one in case.memory:
            yield [case.name, one.what, f"{one.measured_gib:.2f}", f"{one.estimated_gib:.2f}"]


def work_rows(found: Found) -> Iterator[list[str]]:
    for case in found.cases:
        of_teachers = map(sum, case.work.teacher_lengths)
        tokens = dict(zip(case.flops, (case.work.student_tokens, *of_teachers), strict=True))
        for side, flops in case.flops.items():
            parts = [f"{value / TERA:,.4f}" for value in (flops.matrices, flops.head, flops.attention)]
            yield [case.name, side, f"{tokens[side]:,}", *parts, f"{flops.total / case.total_flops:.1%}"]


def too_slow_or_misjudged(cases: Sequence[Case], mfu_floor: float) -> list[str]:
    """What is wrong with steps on a GPU: an MFU below the floor, an estimate of memory that is off by over a fifth."""
    problems = []
    for case in cases:
        by_step = [record["perf/mfu"] for record in case.records if "perf/mfu" in record]
        if by_step and (mfu := statistics.median(by_step)) < mfu_floor:
            problems.append(f"{case.name}: MFU {mfu:.1%} is below {mfu_floor:.0%}")
        problems += [
            f"{case.name}: {one.what}: {one.measured_gib:.2f} GiB measured, {one.estimated_gib:.2f} GiB estimated"
            for one in case.memory
            if abs(one.estimated_gib / one.measured_gib - 1) > ESTIMATE_ERROR
        ]
    return problems


def gold_is_missing(cases: Sequence[Case]) -> list[str]:
    """Return a problem for each case without GOLD."""
    return [f"{case.name}: GOLD is not measured: {case.gold_is_missing}" for case in cases if case.gold is None]


def notes(found: Found, formula: str) -> str:
    lines = [
        "A whole optimizer step of a run (`preflight`, its workers, the loss that the run would use), with random "
        "weights and real text. Trainers take turns, step by step; the one that waits holds its memory and does "
        "nothing. **ours / GOLD** is the median over rounds, so below 1 ours is faster; **range** is the shortest and "
        "longest step. **tokens** are the student's; padding is not counted.",
        "",
        "**peak**: of the student's process on our side, whose teacher is in another one unless "
        "`cluster.launcher=local`, and of GOLD's only process: what PyTorch's allocator held on a GPU, else main "
        "memory with the libraries.",
        "",
        GOLD_NOTES,
        "",
        formula,
    ]
    if found.peak is None:
        lines += ["", "There is no MFU on a CPU, whose peak is not known; `--peak` gives one."]
    return "\n".join(lines)


def write(output: Path, found: Found, formula: str) -> str:
    """step.md for reading, which is returned, and step.json with every figure behind it."""
    facts = "\n".join(f"* {name}: {value}" for name, value in found.facts.items())
    tables = "\n".join(grid.markdown() for grid in grids(found))
    text = "\n".join(["# A training step", "", facts, "", notes(found, formula), "", tables])
    output.mkdir(parents=True, exist_ok=True)
    (output / "step.md").write_text(text, encoding="utf-8")
    (output / "step.json").write_text(json.dumps(asdict(found), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return text
