"""Runs of a sweep side by side: a table, and a page with the curve of each run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.table import Table

from nemo_opd.errors import DataError
from nemo_opd.files import write_atomically
from nemo_opd.logging.charts import write_chart
from nemo_opd.logging.formats import change, clock, figure, is_share, score, share
from nemo_opd.logging.jsonl import read
from nemo_opd.logging.page import render
from nemo_opd.logging.question_plot import question_measures
from nemo_opd.logging.run_curves import draw_runs
from nemo_opd.logging.tables import titled_table

_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?)")
_CURVES = (("val/bits_per_byte", "bits per byte"), ("eval/pass@1", "pass@1"), ("train/loss", "training loss, nats"))
"""Metrics and labels; the first metric that any run has is drawn."""
_REPORT, _RESULTS = "report/report.html", "results.json"


@dataclass(frozen=True, slots=True)
class SweptRun:
    """A run of a sweep, up to its last record."""

    name: str
    """Name of its folder; in a sweep, the settings that it varies."""
    folder: Path
    records: tuple[Mapping[str, float], ...]
    """Metrics; empty if it did not start."""
    has_started: bool
    page: str | None
    """File in its folder, for readers, that it wrote at its end; None if it did not finish."""

    def last(self, key: str) -> float | None:
        return next((record[key] for record in reversed(self.records) if key in record), None)

    def cells(self, measures: Sequence[str]) -> list[str]:
        """Return its row: name, each result, steps, and time in training steps."""
        steps = f"{self.last('step') or 0:,.0f}{'' if self.page else ', not complete'}"
        seconds = sum(record.get("perf/step_s", 0.0) for record in self.records)
        results = [self._cell(measure) for measure in measures]
        return [self.name, *results, steps if self.has_started else "refused, or not started", clock(seconds)]

    def _cell(self, key: str) -> str:
        value = self.last(key)
        if value is None or not math.isfinite(value):
            return "-"
        if key.startswith("eval/"):
            low, high = self.last(f"{key}_low"), self.last(f"{key}_high")
            if low is None or high is None:
                return share(value)
            return score(value, low, high, is_share=is_share(key, value, low, high))
        if key != "val/bits_per_byte":
            return figure(value)
        before = next(record[key] for record in self.records if key in record)
        return f"{value:.4f} ({change(value / before - 1)})" if before and len(self.records) > 1 else f"{value:.4f}"


def read_sweep(root: Path, names: Iterable[str] = ()) -> list[SweptRun]:
    """Return the runs in a folder, sorted with numbers by value.

    names: more runs, which may have no folder.
    """
    names_on_disk = {file.parent.name for file in root.glob("*/config.yaml")}
    return [read_run(root / name, name) for name in sorted(names_on_disk | set(names), key=by_size)]


def by_size(name: str) -> list[tuple[float, str]]:
    """Return a sort key that puts 10 after 9."""
    return [(float(part), "") if i % 2 else (0.0, part) for i, part in enumerate(_NUMBER.split(name))]


def read_run(folder: Path, name: str) -> SweptRun:
    """Return a run up to its last record; without records if they are damaged."""
    metrics, results = folder / "metrics.jsonl", folder / _RESULTS
    try:
        records = tuple(read(metrics)) if metrics.exists() else ()
    except DataError:
        records = ()
    if results.exists():
        records = (_evaluation_record(results),)
    page = next((page for page in (_REPORT, _RESULTS) if (folder / page).exists()), None)
    return SweptRun(name, folder, records, (folder / "config.yaml").exists(), page)


def _evaluation_record(results: Path) -> dict[str, float]:
    """Return the results of `nemo-opd evaluate` as a run's record."""
    content = json.loads(results.read_bytes())
    sets = {"eval/": content} if "estimates" in content else {}
    named = {**content.get("sets", {}), **content.get("benchmarks", {})}
    sets |= {f"eval/{name}/": result for name, result in named.items()}
    record = {"step": 0, "perf/step_s": sum(result.get("seconds", 0) for result in sets.values())}
    for prefix, result in sets.items():
        for name, estimate in result["estimates"].items():
            key = f"{prefix}{name}"
            record |= {key: estimate["value"], f"{key}_low": estimate["low"], f"{key}_high": estimate["high"]}
    return record


def measures_of(runs: Sequence[SweptRun]) -> list[str]:
    """Return the metrics that have a column: validation and questions, or the training loss if there are neither."""
    records = [record for run in runs for record in run.records]
    metrics = {key for record in records for key in record}
    measures = [key for key in ("val/bits_per_byte",) if key in metrics] + question_measures(records)
    return measures or [key for key in ("train/loss",) if key in metrics]


def heads_of(measures: Sequence[str]) -> list[str]:
    """Return the headings of the columns of `SweptRun.cells`."""
    names = {"val/bits_per_byte": "bits per byte", "train/loss": "loss"}
    return ["run", *(names.get(key, key.removeprefix("eval/")) for key in measures), "steps", "time"]


def sweep_table(runs: Sequence[SweptRun], title: str = "Sweep") -> Table:
    """Return a table with a row for each run, with only the first two measures to fit a width of 80."""
    measures = measures_of(runs)[:2]
    table = titled_table(title)
    for i, head in enumerate(heads_of(measures)):
        table.add_column(head, justify="right" if i else "left", overflow="fold")
    for run in runs:
        table.add_row(*run.cells(measures))
    return table


def write_sweep_report(root: Path, runs: Sequence[SweptRun]) -> Path:
    """Write sweep.png and report.html to the sweep's folder; return the page."""
    measures = measures_of(runs)
    charts = []
    if curve := next((curve for curve in _CURVES if any(run.last(curve[0]) is not None for run in runs)), None):
        key, label = curve
        columns = 1 if max(len(run.name) for run in runs) > 30 else 3
        curves = [(run.name, run.records) for run in runs]
        draw = partial(draw_runs, runs=curves, key=key, label=label)
        title = f"{label[0].upper()}{label[1:]}"
        charts.append(write_chart(root / "sweep.png", title, draw, (9, 4.2), legend_columns=columns))
    page = render(
        "sweep.html",
        title=root.name,
        folder=root,
        heads=heads_of(measures),
        runs=runs,
        measures=measures,
        charts=charts,
    )
    write_atomically(root / "report.html", page)
    return root / "report.html"
