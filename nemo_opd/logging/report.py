"""report/: the curves as PNG files and a page with all results, from the files of the run directory."""

import base64
import re
import statistics
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from nemo_opd.files import write_atomically
from nemo_opd.logging.interface import (
    ClosingTable,
    amount,
    bits,
    change,
    clock,
    difference,
    figure,
    score,
    score_texts,
    share,
)
from nemo_opd.logging.loggers import read
from nemo_opd.logging.plots import PLOTS
from nemo_opd.logging.provenance import Provenance, read_provenance
from nemo_opd.logging.records import (
    Records,
    config_text,
    group_tables,
    markdown,
    number_of_set,
    overview,
    read_config,
    read_hardware,
    read_projections,
    run_facts,
    run_name,
    teacher_facts,
)
from nemo_opd.logging.scores import SAMPLE_LOG, SampleLog, ValueLog, answer_tables, answers_by_question
from nemo_opd.logging.terminal import visible

MAX_OPEN = 480
"""Length in characters up to which a text is shown in full; longer texts show their start and end, as answers usually
come last.
"""
_MAX_OPEN_LINES = 12


class _Tile(NamedTuple):
    """A figure in large type."""

    label: str
    value: str


def write_report(output_dir: Path, closing: ClosingTable | None = None) -> Path:
    """Write report/*.png, tables.md and report.html from a run's files and the closing table; return the page.

    Reads metrics.jsonl, config.yaml, hardware.json, samples.jsonl and evaluation.jsonl if they exist, so a running run
    can be reported. Raises DataError if one of them is damaged.
    """
    closing = closing or ClosingTable(before=None, after=None)
    records, folder = read(output_dir / "metrics.jsonl"), output_dir / "report"
    charts = [plot.write(folder, records, closing) for plot in PLOTS if plot.has_data(records)]
    shown = SampleLog(output_dir / SAMPLE_LOG).read()
    answers = [answer for answer in shown if answer.kind != "continued"]
    config, tables = read_config(output_dir), group_tables(records)
    tables += answer_tables(ValueLog(output_dir / "evaluation.jsonl").read())
    if tables:
        write_atomically(folder / "tables.md", "\n".join(map(markdown, tables)).encode())
    provenance = read_provenance(output_dir)
    started_from = None if provenance is None else provenance.started_from
    page = render(
        "report.html",
        title=visible(run_name(config) or output_dir.name),
        folder=output_dir,
        overview=[*_course(provenance, records), *overview(config, started_from)],
        tiles=[*_result_tiles(closing), *_progress_tiles(records)],
        closing=closing,
        charts=charts,
        questions=answers_by_question(answers),
        continued=answers_by_question([answer for answer in shown if answer.kind == "continued"]),
        correct_rewards={
            name: number_of_set(config, name, "correct_reward") for name in {answer.set for answer in answers}
        },
        moved_rows=read_projections(output_dir),
        tables=tables,
        teachers=teacher_facts(config, records),
        facts=run_facts(config, read_hardware(output_dir), records),
        config_text=config_text(output_dir),
    )
    write_atomically(folder / "report.html", page)
    return folder / "report.html"


def _course(provenance: Provenance | None, records: Records) -> Iterable[tuple[str, str]]:
    """Yield when the run was started and how far it got."""
    if provenance is not None and provenance.started is not None:
        yield "started", provenance.started
    steps = int(records[-1]["step"]) if records else 0
    total = None if provenance is None else provenance.total_steps
    if total is not None and steps < total:
        yield "status", f"not finished, step {steps:,} of {total:,}"
    else:
        yield "status", f"finished, {steps:,} step{'' if steps == 1 else 's'}"


def _result_tiles(closing: ClosingTable) -> Iterable[_Tile]:
    for row in closing.scores[:1]:
        form = share if row.is_share else figure
        before = "" if row.before is None else f", was {form(row.before.value)}"
        yield _Tile(f"{row.measure}{before}", form(row.after.value))
    if (best := closing.best) is not None:
        yield _Tile(f"best {best.metric}, of step {best.step:,}", f"{best.value:.4g}")


def _progress_tiles(records: Records) -> Iterable[_Tile]:
    trained = [record for record in records if record["step"] > 0]
    if not trained:
        return
    yield _Tile("steps", f"{trained[-1]['step']:,.0f}")
    for label, key, pool, form in (
        ("student tokens", "train/student_tokens", sum, amount),
        ("in training steps", "perf/step_s", sum, clock),
        ("tokens / second", "perf/tokens_per_s", statistics.median, amount),
        ("MFU", "perf/mfu", statistics.median, "{:.0%}".format),
        ("of the input is not padding", "perf/useful_positions", statistics.median, share),
        ("GB at the peak", "perf/peak_memory_gb", max, "{:.1f}".format),
    ):
        values = [record[key] for record in trained if key in record and record[key] == record[key]]
        if values:
            yield _Tile(label, form(pool(values)))


def render(template: str, **context: Any) -> bytes:
    """Return the page of a template. HTML pages need a title and a folder, and their texts are escaped."""
    return _environment().get_template(template).render(**context).encode()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("nemo_opd.logging"),
        autoescape=select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "amount": amount,
        "bits": bits,
        "change": change,
        "data_url": _data_url,
        "ends": _ends,
        "cell": _cell,
        "unbroken": _unbroken,
    }
    environment.globals |= {"score_texts": score_texts, "score_text": score, "difference_text": difference}
    return environment


def _data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _cell(text: str) -> str:
    """Format a text as a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def _unbroken(text: str) -> str:
    """Keep a figure on one line with its unit, and an interval with its bounds."""
    return re.sub(r"(?<=±) |(?<=\d) (?=[%±]|points|to )|(?<=\d to) ", "\N{NO-BREAK SPACE}", text)


def _ends(text: str) -> tuple[str, str]:
    """Return the start and end of a text to show; the end is empty if the text is shown in full."""
    lines = text.split("\n")
    if len(text) <= MAX_OPEN and len(lines) <= _MAX_OPEN_LINES:
        return text, ""
    half, num_lines = MAX_OPEN // 2, _MAX_OPEN_LINES // 2
    return "\n".join(lines[:num_lines])[:half].rstrip(), "\n".join(lines[-num_lines:])[-half:].lstrip()
