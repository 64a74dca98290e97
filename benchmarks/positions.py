"""Losses with a target at every student position against those at starts of chunks, beside cross-entropy.

uv run benchmarks/positions.py               # writes benchmarks/results/positions.md and positions.json

The demo's student learns from teachers that are trained here on the demo's texts: one whose tokens are smaller than the
student's, and one whose tokens are larger and have other merges. All runs of a pair read the same batches. Results are
written after each loss, and a loss with a result is not repeated.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from demo import commit, hardware
from inexact_pair import RECIPE, WORDS_WITHOUT_SPACES, make_teacher, of_pair, run_options
from quality_report import plain, signed
from quality_statistics import compare
from rich.console import Console
from teacher_cache import RESULTS, settings, trained

from nemo_opd.config.run import RunConfig, from_dict
from nemo_opd.logging.loggers import read

TEACHERS = {
    "smaller tokens": RECIPE,
    "larger tokens": replace(RECIPE, bpe=replace(WORDS_WITHOUT_SPACES, size=6144)),
}
EVERYWHERE = {"type": "byte_prefix", "positions": "all"}
CONTROL = "cross-entropy alone"
TOTAL = "val/shared_bits_per_byte/cross"
COMPARED = ("val/shared_bits_per_byte", "val/chunk/cross/")
"""First parts of the names of the stored metrics."""
GRADIENTS_EVERY = 6
"""Steps between two comparisons of KD's gradient with cross-entropy's."""
LOSSES: dict[str, dict[str, object]] = {
    CONTROL: {"type": "byte_prefix", "kd_weight": 0.0},
    "p_kl": {"type": "p_kl"},
    "byte_prefix everywhere, ends=drop": EVERYWHERE | {"ends": "drop"},
    "byte_prefix at starts": {"type": "byte_prefix"},
    "shared_prefix, pieces=spelling": {"type": "shared_prefix", "pieces": "spelling"},
    "byte_prefix at starts, kd_weight=0.5": {"type": "byte_prefix", "kd_weight": 0.5},
    "byte_prefix at starts, normalizer=student_tokens": {"type": "byte_prefix", "normalizer": "student_tokens"},
    "byte_prefix everywhere, ends=drop, kd_weight=0.5": EVERYWHERE | {"ends": "drop", "kd_weight": 0.5},
    "byte_prefix everywhere, ends=cover": EVERYWHERE | {"ends": "cover"},
    "byte_prefix everywhere, ends=rest": EVERYWHERE | {"ends": "rest"},
    "p_kl, normalizer=student_tokens": {"type": "p_kl", "normalizer": "student_tokens"},
    "alm, temperature=1": {"type": "alm", "temperature": 1.0},
    "alm, temperature=10": {"type": "alm", "temperature": 10.0},
    "alm, temperature=100": {"type": "alm", "temperature": 100.0},
}


@dataclass(frozen=True)
class Measured:
    teacher: str
    loss: str
    bits_per_byte: list[float]
    """Of the student on the validation texts, after training, by seed."""
    norms: list[float] = field(default_factory=list)
    """Norm of KD's gradient, with its weight, divided by cross-entropy's: means over steps, by seed; empty without KD.
    """
    cosines: list[float] = field(default_factory=list)
    """Cosine between the two gradients: means over steps, by seed."""
    start: dict[str, float] = field(default_factory=dict)
    """Bits per byte of the student before training and of the teacher, over all validation texts and by chunk."""


def measure(config: RunConfig, teacher: str, loss: str, seeds: int, folder: Path) -> Measured:
    measured = Measured(teacher, loss, [])
    for seed in range(seeds):
        data, output = config.model_dump(mode="json"), folder / f"{loss} {seed}"
        data["run"]["seed"] = seed
        data["loss"] = {"normalizer": "units"} | LOSSES[loss]
        data["logging"]["gradients_every"] = None if loss == CONTROL else GRADIENTS_EVERY
        measured.bits_per_byte.append(trained(from_dict(data), loss, output, None).bits_per_byte)
        start, *_ = records = read(output / "metrics.jsonl")
        measured.start.update({key: start[key] for key in start if key.startswith(COMPARED)})
        if compared := [record for record in records if "train/kd_ce_cosine" in record]:
            measured.norms.append(mean(step["train/kd_grad_norm"] / step["train/ce_grad_norm"] for step in compared))
            measured.cosines.append(mean(step["train/kd_ce_cosine"] for step in compared))
    return measured


def report(runs: list[Measured], about: str) -> str:
    lines = [
        "# A target at every student position",
        "",
        f"{hardware()}; commit {commit()}; {date.today()}. `uv run benchmarks/positions.py`: {about} Intervals are "
        "95 % of Student's t over the seeds. KD's gradient, with its weight, every "
        f"{GRADIENTS_EVERY}th step: its norm divided by "
        "cross-entropy's, and the cosine between the two. The machine did other work meanwhile.",
    ]
    for teacher in dict.fromkeys(run.teacher for run in runs):
        of_teacher = [run for run in runs if run.teacher == teacher]
        control = dict(enumerate(next(run for run in of_teacher if run.loss == CONTROL).bits_per_byte))
        lines += [
            "",
            f"## A teacher with {teacher}",
            "",
            *starts(next((run.start for run in of_teacher if TOTAL in run.start), {})),
            "| loss | bits per byte | to cross-entropy | KD's gradient: norm | cosine |",
            "|---|---|---|---|---|",
        ]
        for run in sorted(of_teacher, key=lambda run: mean(run.bits_per_byte)):
            comparison = compare(dict(enumerate(run.bits_per_byte)), control)
            difference = "–" if run.loss == CONTROL else signed(comparison.difference)
            means = [f"{mean(values):.2f}" if values else "–" for values in (run.norms, run.cosines)]
            gradients = " | ".join(means).replace("-", "−")
            lines.append(f"| {run.loss} | {plain(comparison.mean)} | {difference} | {gradients} |")
    return "\n".join(lines) + "\n"


def starts(figures: Mapping[str, float]) -> Iterator[str]:
    """Yield lines on the student before training and the teacher."""
    parts = {"all": "val/shared_bits_per_byte"}
    parts |= {kind: f"val/chunk/cross/{kind}/shared_bits_per_byte" for kind in ("1:1", "1:n", "n:1", "n:m")}
    compared = [
        f"{name} {figures[key]:.3f} and {figures[f'{key}/cross']:.3f}"
        for name, key in parts.items()
        if f"{key}/cross" in figures
    ]
    if compared:
        about = "Bits per byte of the student before training and of the teacher, by chunk (student tokens : teacher's)"
        yield from (f"{about}: {', '.join(compared)}.", "")


def sentence(arguments: argparse.Namespace, sizes: Mapping[str, int]) -> str:
    names = " and ".join(f"{size:,} tokens ({name})" for name, size in sizes.items())
    return (
        f"the demo's student of 2,048 tokens and teachers of {arguments.teacher_steps} steps with {names}, "
        "cross-entropy and KD at weights of 1, `normalizer=units` unless said otherwise, "
        f"{arguments.steps} steps of 8 rows of {arguments.max_length} tokens, {arguments.seeds} seeds."
    )


def main() -> None:
    parser = run_options(__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    console, record = Console(), arguments.results / "positions.json"
    runs = [Measured(**run) for run in json.loads(record.read_text())["runs"]] if record.exists() else []
    about = sentence(arguments, {teacher: recipe.bpe.size for teacher, recipe in TEACHERS.items()})
    done = {(run.teacher, run.loss) for run in runs}
    with TemporaryDirectory() as name:
        folder = Path(name)
        common = settings(folder, arguments.steps, arguments.texts)
        for teacher, recipe in TEACHERS.items():
            missing = [loss for loss in LOSSES if (teacher, loss) not in done]
            if not missing:
                continue
            model = make_teacher(folder / teacher, arguments.teacher_steps, recipe)
            config = of_pair(common, model, arguments.max_length)
            for loss in missing:
                runs.append(measure(config, teacher, loss, arguments.seeds, folder / f"runs, {teacher}"))
                console.print(runs[-1])
                write(arguments.results, runs, about)


def write(folder: Path, runs: list[Measured], about: str) -> None:
    folder.joinpath("positions.md").write_text(report(runs, about), encoding="utf-8")
    record = {"about": about, "hardware": hardware(), "commit": commit(), "date": str(date.today())}
    record |= {"runs": [asdict(run) for run in runs]}
    folder.joinpath("positions.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
