"""Several runs on one page: results, differences that make them unlike, settings, curves, and validation by group."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from nemo_opd.errors import DataError
from nemo_opd.files import ELSEWHERE, read_data, write_atomically
from nemo_opd.logging.charts import Theme, question_measures, series, smooth, write_chart
from nemo_opd.logging.console import titled_table
from nemo_opd.logging.interface import change, clock, figure, is_share, score, share
from nemo_opd.logging.loggers import read
from nemo_opd.logging.metrics import BITS_PER_BYTE, NUM_BYTES
from nemo_opd.logging.provenance import read_provenance
from nemo_opd.logging.records import (
    BASELINE,
    NOTHING,
    Records,
    TextTable,
    by_size,
    figures_by_table,
    read_config,
    title_of,
    value_at,
)
from nemo_opd.logging.report import render

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_REPORT, _RESULTS = "report/report.html", "results.json"
_CURVE_TITLES = {
    BITS_PER_BYTE: "Bits per byte",
    "train/ce": "Training cross-entropy, nats",
    "train/loss": "Training loss, nats",
}
_VALIDATED = {BITS_PER_BYTE: "bits per byte", "val/ce": "CE, nats", "val/accuracy": "accuracy"}
"""Name by metric of validation."""
_SAME_START = 1e-3
"""Largest relative difference of the same student before training, from rounding in another layout or dtype."""
_STYLES = ("-", "--", ":", "-.")
"""Line styles, each for as many curves as there are colours."""
_NOT_COMPARED = ("run.name", "run.output_dir", "run.resume", "run.baseline", "run.export_worse")
"""Settings without an effect on what is compared."""
_STARTED_FROM = "checkpoint from-hf --model"
"""Row of the models that runs started from in place of student.model."""
_IDENTIFYING = ("name", "type", "model")
"""Settings that identify a section."""


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
    validation_texts: str | None = None
    """Hash of its validation texts; None if it recorded none."""

    def last(self, key: str) -> float | None:
        return next((record[key] for record in reversed(self.records) if key in record), None)

    def cells(self, measures: Sequence[str]) -> list[str]:
        """Return its row: name, each result, steps, and time in training steps."""
        steps = f"{self.last('step') or 0:,.0f}{'' if self.page else ', not finished'}"
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
        if key == "val/accuracy":
            return share(value)
        if key != BITS_PER_BYTE:
            return figure(value)
        before = next(record[key] for record in self.records if key in record)
        return f"{value:.4f} ({change(value / before - 1)})" if before and len(self.records) > 1 else f"{value:.4f}"


def read_runs(folders: Sequence[Path]) -> list[SweptRun]:
    """Return the runs under the shortest distinct names."""
    resolved = [folder.resolve() for folder in folders]
    parts = 1
    while len({folder.parts[-parts:] for folder in resolved}) < len(set(resolved)):
        parts += 1
    return [_read_run(folder, "/".join(folder.parts[-parts:])) for folder in resolved]


def folders_of_runs(root: Path) -> list[Path]:
    """Return the folders of the runs in a folder, and of the runs without teachers that belong to them."""
    return sorted(file.parent for inner in ("*", f"*/{BASELINE}") for file in root.glob(f"{inner}/config.yaml"))


def read_sweep(root: Path, names: Iterable[str] = ()) -> list[SweptRun]:
    """Return the runs in a folder, sorted with numbers by value.

    names: more runs, which may have no folder.
    """
    names_on_disk = {str(folder.relative_to(root)) for folder in folders_of_runs(root)}
    return [_read_run(root / name, name) for name in sorted(names_on_disk | set(names), key=by_size)]


def _read_run(folder: Path, name: str) -> SweptRun:
    """Return a run up to its last record; without records if they are damaged."""
    results = folder / _RESULTS
    try:
        records = tuple(read(folder / "metrics.jsonl"))
    except DataError:
        records = ()
    if results.exists():
        records = (_evaluation_record(results),)
    page = next((page for page in (_REPORT, _RESULTS) if (folder / page).exists()), None)
    provenance = read_provenance(folder)
    texts = None if provenance is None else provenance.validation_texts
    return SweptRun(name, folder, records, (folder / "config.yaml").exists(), page, texts)


def _evaluation_record(results: Path) -> dict[str, float]:
    """Return the results of `nemo-opd evaluate` as a run's record."""
    content = json.loads(read_data(results))
    sets = {"eval/": content} if "estimates" in content else {}
    named = {**content.get("sets", {}), **content.get("benchmarks", {})}
    sets |= {f"eval/{name}/": result for name, result in named.items()}
    record = {"step": 0, "perf/step_s": sum(result.get("seconds", 0) for result in sets.values())}
    for prefix, result in sets.items():
        for name, estimate in result["estimates"].items():
            key = f"{prefix}{name}"
            record |= {key: estimate["value"], f"{key}_low": estimate["low"], f"{key}_high": estimate["high"]}
    return record


def sweep_table(runs: Sequence[SweptRun], measures: Sequence[str]) -> TextTable:
    """Return a table with a row for each run."""
    return TextTable("Runs", _headings(measures), [run.cells(measures) for run in runs])


def terminal_table(content: TextTable) -> Table:
    """Return a table for a terminal."""
    table = titled_table(content.title)
    for i, head in enumerate(content.heads):
        # A narrow column would break the word after the slash.
        table.add_column(Text(head.replace("/", "/\n")), justify="right" if i else "left", overflow="fold")
    for row in content.rows:
        table.add_row(*map(Text, row))
    return table


def measures_of(runs: Sequence[SweptRun]) -> list[str]:
    """Return the metrics that have a column: validation and questions, or the training loss if there are neither."""
    records = [record for run in runs for record in run.records]
    metrics = {key for record in records for key in record}
    measures = [key for key in _VALIDATED if key in metrics] + question_measures(records)
    return measures or [key for key in ("train/loss",) if key in metrics]


def headline_measures(runs: Sequence[SweptRun]) -> list[str]:
    """Return the first two of `measures_of`, without cross-entropy and accuracy, to fit a width of 80."""
    return [key for key in measures_of(runs) if key == BITS_PER_BYTE or key not in _VALIDATED][:2]


def _headings(measures: Sequence[str]) -> list[str]:
    """Return the headings of the columns of `SweptRun.cells`."""
    names = (f"{_name(key)} (change)" if key == BITS_PER_BYTE else _name(key) for key in measures)
    return ["run", *names, "steps", "time of steps"]


def _name(measure: str) -> str:
    return {**_VALIDATED, "train/loss": "loss"}.get(measure, measure.removeprefix("eval/"))


def unlike(runs: Sequence[SweptRun]) -> list[str]:
    """Say in a sentence for each run why its figures do not compare with those of the first run that has them."""
    validated = [run for run in runs if _validated(run)]
    measures = measures_of(runs)
    last_steps = {
        _name(key): {run.name: steps[-1] for run in runs if (steps := series(run.records, key)[0])} for key in measures
    }
    sentences: list[str] = []
    first = next((run for run in runs if run.last("step")), None)
    for run in runs:
        if run in validated[1:]:
            sentences += _validated_otherwise(run, validated[0])
        differences = list(_step_differences(run.name, last_steps))
        sentences += differences
        # An evaluation has no steps.
        if not differences and first and (last := run.last("step")) and last != first.last("step"):
            sentences.append(f"{run.name}: it took {last:,.0f} steps, {first.name} {first.last('step'):,.0f}.")
    return sentences


def _step_differences(name: str, last_steps: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Say which figures of a run are of another step than the first run's. last_steps: by heading and run."""
    by_steps: dict[tuple[str, float, float], list[str]] = {}
    for heading, by_run in last_steps.items():
        first, first_step = next(iter(by_run.items()))
        if (step := by_run.get(name, first_step)) != first_step:
            by_steps.setdefault((first, first_step, step), []).append(heading)
    for (first, first_step, step), headings in by_steps.items():
        figures = f"{'; '.join(headings)} {'is' if len(headings) == 1 else 'are'}"
        yield f"{name}: its {figures} of step {step:,.0f}, {first}'s of step {first_step:,.0f}."


def _read_alike(run: SweptRun, first: SweptRun) -> bool:
    """Return whether both runs were validated on the same bytes, as far as they recorded them."""
    return all(None in pair or pair[0] == pair[1] for pair in _validation_data(run, first))


def _validation_data(
    run: SweptRun, first: SweptRun
) -> tuple[tuple[str | None, str | None], tuple[float | None, float | None]]:
    """Return both runs' hashes of the validation texts, and their numbers of bytes."""
    return (run.validation_texts, first.validation_texts), (run.last(NUM_BYTES), first.last(NUM_BYTES))


def _validated_otherwise(run: SweptRun, first: SweptRun) -> Iterator[str]:
    texts, sizes = _validation_data(run, first)
    if texts[0] is None or texts[1] is None or sizes[0] is None or sizes[1] is None:
        unknown = run if texts[0] is None or sizes[0] is None else first
        yield f"{run.name}: {unknown.name} has no record of its validation texts or bytes, so the two may not compare."
    elif texts[0] != texts[1]:
        yield f"{run.name}: it was validated on other texts than {first.name}, so bits per byte do not compare."
    elif sizes[0] != sizes[1]:
        yield (
            f"{run.name}: its bits per byte are over {sizes[0]:,.0f} bytes, and those of {first.name} over "
            f"{sizes[1]:,.0f}, so they do not compare."
        )
    start, first_start = _validated(run)[0], _validated(first)[0]
    bits, first_bits = start[BITS_PER_BYTE], first_start[BITS_PER_BYTE]
    are_starts = start["step"] == first_start["step"] == 0 and _read_alike(run, first)
    if are_starts and abs(bits - first_bits) > _SAME_START * first_bits:
        yield f"{run.name}: it started at {bits:.4f} bits per byte, {first.name} at {first_bits:.4f}."


def _validated(run: SweptRun) -> list[Mapping[str, float]]:
    return [record for record in run.records if BITS_PER_BYTE in record]


def write_comparison(
    page: Path,
    runs: Sequence[SweptRun],
    tables: Sequence[TextTable] = (),
    verdicts: Sequence[str] = (),
    *,
    instead: str = ELSEWHERE,
) -> None:
    """Write the page, and its curves as PNG into a folder with its name.

    tables: more tables, after the results. verdicts: sentences at the top. instead: advice if a file cannot be written.
    """
    measures = measures_of(runs)
    metrics = {key for run in runs for record in run.records for key in record}
    # With and without KD, the loss is not the same quantity.
    have_teachers = {bool(value_at(read_config(run.folder), "loss.kd_weight")) for run in runs if run.records}
    replaced = "train/loss" if len(have_teachers) > 1 and "train/ce" in metrics else "train/ce"
    keys = [key for key in _CURVE_TITLES if key in metrics and key != replaced]
    keys += question_measures([record for run in runs for record in run.records])
    curves = [(run.name, run.records) for run in runs]
    columns = 1 if max((len(run.name) for run in runs), default=0) > 30 else 3
    charts = [
        write_chart(
            page.with_suffix("") / f"{key.replace('/', '_')}.png",
            _CURVE_TITLES.get(key, key.removeprefix("eval/")),
            partial(_draw_runs, runs=curves, key=key, label=_CURVE_TITLES.get(key, key)),
            (6.2, 4.2),
            legend_columns=columns,
            instead=instead,
        )
        for key in keys
    ]
    all_tables = [sweep_table(runs, measures), *tables, *_group_tables(runs)]
    reports = {run.name: os.path.relpath(run.folder / run.page, page.parent) for run in runs if run.page}
    content = render(
        "comparison.html",
        title="Comparison",
        folder=page.parent.absolute(),
        verdicts=verdicts,
        tables=all_tables,
        notes=unlike(runs),
        charts=charts,
        reports=reports,
    )
    write_atomically(page, content, instead=instead)


def setting_tables(runs: Sequence[SweptRun]) -> list[TextTable]:
    """Return a table of the settings that differ between the runs, if any do.

    A section that a run lacks, such as a teacher, is one row.
    """
    by_run = {run.name: flat for run in runs if (flat := _settings_of(run.folder))}
    settings = list(by_run.values())
    sections = [{prefix for key in by_key for prefix in _prefixes(key)} for by_key in settings]
    keys = dict.fromkeys(key for by_key in settings for key in by_key if key not in _NOT_COMPARED)
    differing = [key for key in keys if len({by_key.get(key) for by_key in settings} - _same_as_any(key)) > 1]
    row_of = {
        key: next((prefix for prefix in _prefixes(key) if any(prefix not in present for present in sections)), key)
        for key in differing
    }
    rows = [[row, *(_setting(by_key, row) for by_key in settings)] for row in dict.fromkeys(row_of.values())]
    return [TextTable("Settings that differ", ["", *by_run], rows)] if rows else []


def _same_as_any(key: str) -> set[str]:
    """Return values of a setting that are equal to any other: a teacher that is not loaded keeps the type auto."""
    return {"auto"} if re.fullmatch(r"teachers\.\d+\.type", key) else set()


def _settings_of(folder: Path) -> dict[str, str]:
    provenance, settings = read_provenance(folder), _flat(read_config(folder))
    started_from = None if provenance is None else provenance.started_from
    return settings if started_from is None else settings | {_STARTED_FROM: started_from}


def _prefixes(key: str) -> list[str]:
    """Return the sections of a dotted key, the outermost first; an element of a list is one, the list is not."""
    parts = key.split(".")
    return [".".join(parts[:stop]) for stop in range(1, len(parts)) if not parts[stop].isdigit()]


def _setting(by_key: Mapping[str, str], key: str) -> str:
    """Return a setting's value, or what identifies a section."""
    if key in by_key:
        return by_key[key]
    values = [by_key.get(f"{key}.{name}", "auto") for name in _IDENTIFYING]
    named = [value for value in values if value != "auto"]
    inner = named or [f"{name.removeprefix(f'{key}.')}={by_key[name]}" for name in by_key if name.startswith(f"{key}.")]
    return ", ".join(inner) or NOTHING


def _flat(settings: Any, prefix: str = "") -> dict[str, str]:
    """Return values that are set as JSON by dotted key; elements of a list are keyed by index."""
    if settings in (None, [], {}):
        return {}
    if isinstance(settings, list) and any(isinstance(element, Mapping) for element in settings):
        settings = dict(enumerate(settings))
    if not isinstance(settings, Mapping):
        return {prefix: settings if isinstance(settings, str) else json.dumps(settings, default=str)} if prefix else {}
    inner = (_flat(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in settings.items())
    return {key: value for flat in inner for key, value in flat.items()}


def _group_tables(runs: Sequence[SweptRun]) -> list[TextTable]:
    """Return the last bits per byte of each run by group, with the group's share in the first run that has it."""
    last = [
        next((figures for record in reversed(run.records) if (figures := figures_by_table(record))), {}) for run in runs
    ]
    tables = []
    counts = Counter(name for by_table in last for name in by_table)
    for table in (name for name, count in counts.items() if count > 1 or len(runs) == 1):
        groups = dict.fromkeys(group for by_table in last for group in by_table.get(table, {}))
        rows = []
        for group in groups:
            by_run = [by_table.get(table, {}).get(group, {}) for by_table in last]
            shares = [figures["share"] for figures in by_run if "share" in figures]
            first = by_run[0].get("bits_per_byte")
            cells = [
                _bits(figures.get("bits_per_byte"), first if _read_alike(run, runs[0]) else None)
                for run, figures in zip(runs, by_run, strict=True)
            ]
            if len({*cells}) > 1 or NOTHING not in cells:
                rows.append([group.replace("_", " "), share(shares[0]) if shares else NOTHING, *cells])
        heads = ["", "share of tokens", *(run.name for run in runs)]
        tables.append(TextTable(f"{title_of(table)}: bits per byte after", heads, rows))
    return tables


def _bits(value: float | None, first: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.4f}" + (f" ({change(value / first - 1)})" if first and value != first else "")


def _draw_runs(figure: Figure, theme: Theme, runs: Sequence[tuple[str, Records]], key: str, label: str) -> None:
    """Draw the smoothed curve of each run, with the metric's confidence interval if it has one."""
    axes = figure.subplots()
    for (name, records), (style, colour) in zip(runs, cycle(product(_STYLES, theme.cycle)), strict=False):
        steps, values = series(records, key)
        if not steps:
            continue
        marker = "o" if len(steps) < 12 else None
        axes.plot(steps, smooth(values), style, color=colour, label=name, marker=marker, markersize=4)
        low, high = series(records, f"{key}_low")[1], series(records, f"{key}_high")[1]
        if len(low) == len(high) == len(steps):
            axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set_ylabel(label)
