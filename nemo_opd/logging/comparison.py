"""Several runs on one page: results, settings that differ, curves, and validation by group."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nemo_opd.files import write_atomically
from nemo_opd.logging.charts import write_chart
from nemo_opd.logging.facts import read_config
from nemo_opd.logging.formats import change, share
from nemo_opd.logging.group_tables import NOTHING, TextTable, figures_by_table, title_of
from nemo_opd.logging.page import render
from nemo_opd.logging.question_plot import question_measures
from nemo_opd.logging.run_curves import draw_runs
from nemo_opd.logging.sweep import SweptRun, heads_of, measures_of, read_run

_CURVES = {"val/bits_per_byte": "Bits per byte", "train/loss": "Training loss, nats"}
_INSTEAD = "name another --output"
_LEFT_OUT = ("run.output_dir", "run.resume")
"""Settings that differ between any two runs."""


def read_runs(folders: Sequence[Path]) -> list[SweptRun]:
    """Return the runs under the shortest distinct names."""
    resolved = [folder.resolve() for folder in folders]
    parts = 1
    while len({folder.parts[-parts:] for folder in resolved}) < len(set(resolved)):
        parts += 1
    return [read_run(folder, "/".join(folder.parts[-parts:])) for folder in resolved]


def write_comparison(page: Path, runs: Sequence[SweptRun], tables: Sequence[TextTable]) -> None:
    """Write the page, and its curves as PNG into a folder with its name.

    tables: more tables, after the results.
    """
    measures = measures_of(runs)
    metrics = {key for run in runs for record in run.records for key in record}
    keys = [key for key in _CURVES if key in metrics]
    keys += question_measures([record for run in runs for record in run.records])
    curves = [(run.name, run.records) for run in runs]
    charts = [
        write_chart(
            page.with_suffix("") / f"{key.replace('/', '_')}.png",
            _CURVES.get(key, key.removeprefix("eval/")),
            partial(draw_runs, runs=curves, key=key, label=_CURVES.get(key, key)),
            (9, 4.2),
            legend_columns=3,
            instead=_INSTEAD,
        )
        for key in keys
    ]
    results = TextTable("Runs", heads_of(measures), [run.cells(measures) for run in runs])
    all_tables = [results, *tables, *setting_tables(runs), *_group_tables(runs)]
    reports = {run.name: os.path.relpath(run.folder / run.page, page.parent) for run in runs if run.page}
    content = render(
        "comparison.html", title="Comparison", folder=page.parent, tables=all_tables, charts=charts, reports=reports
    )
    write_atomically(page, content, instead=_INSTEAD)


def setting_tables(runs: Sequence[SweptRun]) -> list[TextTable]:
    """Return a table of the settings that differ between the runs, if any do."""
    settings = [_flat(read_config(run.folder)) for run in runs]
    keys = dict.fromkeys(key for by_key in settings for key in by_key if key not in _LEFT_OUT)
    rows = [[key, *(by_key.get(key, NOTHING) for by_key in settings)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return [TextTable("Settings that differ", ["", *(run.name for run in runs)], rows)] if rows else []


def _flat(settings: Any, prefix: str = "") -> dict[str, str]:
    """Return values as JSON by dotted key; elements of a list are keyed by index."""
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
    for table in dict.fromkeys(name for by_table in last for name in by_table):
        groups = dict.fromkeys(group for by_table in last for group in by_table.get(table, {}))
        rows = []
        for group in groups:
            by_run = [by_table.get(table, {}).get(group, {}) for by_table in last]
            shares = [figures["share"] for figures in by_run if "share" in figures]
            cells = [_bits(figures.get("bits_per_byte"), by_run[0].get("bits_per_byte")) for figures in by_run]
            rows.append([group.replace("_", " "), share(shares[0]) if shares else NOTHING, *cells])
        heads = ["", "share of tokens", *(run.name for run in runs)]
        tables.append(TextTable(f"{title_of(table)}: bits per byte after", heads, rows))
    return tables


def _bits(value: float | None, first: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.4f}" + (f" ({change(value / first - 1)})" if first and value != first else "")
