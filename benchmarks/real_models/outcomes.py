"""Results of the real-model benchmark's runs: one JSON file each."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.demo import commit, hardware
from nemo_opd.files import write_atomically
from nemo_opd.logging.loggers import read

CPU_TIMES = "cpu.jsonl"
_KEPT = (
    *("train/ce", "train/loss", "train/kd", "val/bits_per_byte", "eval/sums/greedy", "eval/sums/pass@1"),
    *("train/student_tokens", "perf/step_s", "train/kd_grad_norm", "train/ce_grad_norm", "train/kd_ce_cosine"),
)
"""Curves of a result."""


@dataclass(frozen=True)
class Outcome:
    experiment: str
    setting: str
    seed: int
    steps: int
    settings: Mapping[str, Any]
    """Of the run, as it was given."""
    start: Mapping[str, float]
    """Bits per byte over all validation texts, `all`, and by domain; or the shares of right answers."""
    end: Mapping[str, float]
    teacher: Mapping[str, float]
    """Bits per byte of the teacher by domain; empty without one."""
    curves: Mapping[str, list[list[float]]]
    """Metric → pairs of a step and the value."""
    cpu_s_per_step: float
    """Median of the process's CPU time between two steps, without validation."""
    cpu_s: float
    """Of all steps; where not each was timed, the median for each."""
    wall_s: float
    """Of the process, since it last began; with what else the machine did."""
    load: float
    """Mean number of processes that wanted a core, at the end."""
    hardware: str
    commit: str
    date: str
    cache_cpu_s: float = 0.0
    """CPU time in which the teacher's outputs were added to its cache before the first step."""
    memory_bytes: int = 0
    """Most memory of the device, or on a CPU of the process; 0 if it was not measured."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.experiment, self.setting, self.seed


class StepTimes:
    """CPU time of each step, in a file beside the metrics, so that a continued run has them all."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / CPU_TIMES
        self._began: float | None = None

    def on_evaluate(self, step: int, values: Mapping[str, float]) -> None:
        self._began = None

    def on_step(self, step: int, record: Mapping[str, float]) -> None:
        now = time.process_time()
        if self._began is not None:
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"step": step, "cpu_s": now - self._began}) + "\n")
        self._began = now


def outcome_of(
    folder: Path, experiment: str, setting: str, seed: int, settings: Mapping[str, Any], wall_s: float
) -> Outcome:
    """Read what a whole run has left. Without a validation it has no `start`, `end` and `teacher`."""
    records = read(folder / "metrics.jsonl")
    measured = [record for record in records if "val/bits_per_byte" in record or "eval/sums/greedy" in record]
    cpu = {row["step"]: row["cpu_s"] for row in read(folder / CPU_TIMES)}
    per_step = median(cpu.values())
    steps = int(records[-1]["step"])
    return Outcome(
        experiment,
        setting,
        seed,
        steps,
        settings,
        _scores(measured[0]) if measured else {},
        _scores(measured[-1]) if measured else {},
        _scores(measured[0], f"/{settings['teachers'][0]['name']}") if measured else {},
        curves(records),
        per_step,
        per_step * steps,
        wall_s,
        os.getloadavg()[0],
        hardware(),
        commit(),
        date.today().isoformat(),
    )


def curves(records: list[dict[str, float]]) -> dict[str, list[list[float]]]:
    found = {key: [[record["step"], round(record[key], 5)] for record in records if key in record] for key in _KEPT}
    return {key: points for key, points in found.items() if points}


def _scores(record: Mapping[str, float], teacher: str = "") -> dict[str, float]:
    """Return bits per byte over all and by domain, and shares of right answers; of the student or of a teacher."""
    found = {}
    end = f"/shared_bits_per_byte{teacher}" if teacher else "/bits_per_byte"
    for key, value in record.items():
        if key == f"val{end}":
            found["all"] = value
        elif key.startswith("val/domain/") and key.endswith(end):
            found[key.removeprefix("val/domain/").removesuffix(end)] = value
        elif key.startswith("eval/sums/") and not teacher:
            found[key.removeprefix("eval/sums/")] = value
    return found


def result_file(results: Path, experiment: str, setting: str, seed: int) -> Path:
    return results / experiment / f"{setting}_{seed}.json"


def write_outcome(results: Path, outcome: Outcome) -> None:
    text = json.dumps(asdict(outcome), ensure_ascii=False)
    write_atomically(result_file(results, *outcome.key), (text + "\n").encode())


def read_outcomes(results: Path) -> list[Outcome]:
    files = sorted(results.glob("*/*.json"))
    return [Outcome(**json.loads(file.read_text(encoding="utf-8"))) for file in files]
