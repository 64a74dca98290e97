"""report/: the curves as PNG and one page that holds everything, made from the run directory alone."""

import statistics
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import yaml

from nemo_opd.files import write_atomically
from nemo_opd.logging.base import ClosingRow, ClosingTable, Score, ScoreRow
from nemo_opd.logging.facts import Fact, correct_reward, run_facts, run_name, teacher_facts
from nemo_opd.logging.formats import amount, change, clock, interval, score_form
from nemo_opd.logging.hardware import read_hardware
from nemo_opd.logging.jsonl import read
from nemo_opd.logging.page import chart, page
from nemo_opd.logging.plots import DARK, LIGHT, PLOTS, Plot, Records
from nemo_opd.logging.sample_table import samples_section

NOTHING = ClosingTable(before=None, after=None)


def write_report(output_dir: Path, closing: ClosingTable | None = None) -> Path:
    """Writes report/*.png and report.html from the run's files and the closing table; returns the page.

    The files are metrics.jsonl, config.yaml and samples.jsonl, as far as they are there. Works on a run that is still
    going, without a closing table. Raises DataError where one of them is damaged.
    """
    closing = closing or NOTHING
    metrics = output_dir / "metrics.jsonl"
    records = read(metrics) if metrics.exists() else []
    config_file = output_dir / "config.yaml"
    config_text = config_file.read_text(encoding="utf-8") if config_file.exists() else ""
    folder = output_dir / "report"
    charts = [_chart(plot, records, closing, folder) for plot in PLOTS if plot.has_data(records)]
    write_atomically(folder / "report.html", _page(records, closing, config_text, charts, output_dir).encode())
    return folder / "report.html"


def _chart(plot: Plot, records: Records, closing: ClosingTable, folder: Path) -> str:
    light = plot.png(records, closing, LIGHT)
    write_atomically(folder / f"{plot.name}.png", light)
    dark = plot.png(records, closing, DARK)
    return chart(plot.title, light, dark)


def _page(records: Records, closing: ClosingTable, config_text: str, charts: list[str], output_dir: Path) -> str:
    config = yaml.safe_load(config_text) or {}
    title = escape(run_name(config) or output_dir.name)
    body = (
        f"<header><h1>{title}</h1><p>{escape(str(output_dir))}</p></header>",
        _tiles(records, closing),
        _closing_section(closing),
        _score_section(closing),
        f'<div class="charts">{"".join(charts)}</div>' if charts else "",
        samples_section(output_dir / "samples.jsonl", correct_reward(config)),
        _facts_section("Teachers", teacher_facts(config, records)),
        _facts_section("Run", run_facts(config, read_hardware(output_dir), records)),
        _config_section(config_text),
    )
    return page(title, body, "the files of this run")


def _tiles(records: Records, closing: ClosingTable) -> str:
    tiles = [*_score_tile(closing), *_result_tile(closing), *_progress_tiles(records)]
    cells = "".join(f'<div class="tile"><b>{value}</b><span>{label}</span></div>' for label, value in tiles)
    return f'<div class="tiles">{cells}</div>' if tiles else ""


def _result_tile(closing: ClosingTable) -> Iterable[tuple[str, str]]:
    before, after = closing.before, closing.after
    if after is None or after.bits_per_byte is None:
        return
    yield "bits per byte", f"{after.bits_per_byte:.4f}"
    if before is not None and before.bits_per_byte is not None:
        yield "vs start", _change_html(closing, after)


def _score_tile(closing: ClosingTable) -> Iterable[tuple[str, str]]:
    if closing.scores:
        row = closing.scores[0]
        before = "" if row.before is None else f", was {row.before.value:.1%}"
        yield f"{row.measure}{before}", f"{row.after.value:.1%}"


def _progress_tiles(records: Records) -> Iterable[tuple[str, str]]:
    trained = [record for record in records if record["step"] > 0]
    if not trained:
        return
    yield "steps", f"{trained[-1]['step']:,.0f}"
    for label, key, pool, form in (
        ("student tokens", "train/student_tokens", sum, amount),
        ("in training steps", "perf/step_s", sum, clock),
        ("tokens / second", "perf/tokens_per_s", statistics.median, amount),
        ("GB at the peak", "perf/peak_memory_gb", max, "{:.1f}".format),
    ):
        known = [record[key] for record in trained if key in record and record[key] == record[key]]
        if known:
            yield label, form(pool(known))


def _closing_section(closing: ClosingTable) -> str:
    if not closing.rows:
        return ""
    rows = "".join(_closing_row(closing, row) for row in closing.rows)
    return (
        "<section><h2>Validation text</h2><table><thead><tr><th>model</th>"
        '<th class="number">bits per byte</th><th class="number">vs start</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></section>"
    )


def _score_section(closing: ClosingTable) -> str:
    if not closing.scores:
        return ""
    models = list(dict.fromkeys(model for row in closing.scores for model in row.by_model))
    heads = "".join(f'<th class="number">{escape(model)}</th>' for model in models)
    rows = "".join(_score_row(row, models) for row in closing.scores)
    return (
        f'<section class="scores"><h2>Questions</h2><table><thead><tr><th>measure</th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></section>"
    )


def _score_row(row: ScoreRow, models: Sequence[str]) -> str:
    cells = "".join(_score_cell(row, row.by_model.get(model)) for model in models)
    return f"<tr><td>{escape(row.measure)}</td>{cells}</tr>"


def _score_cell(row: ScoreRow, score: Score | None) -> str:
    if score is None:
        return '<td class="number">–</td>'
    form = score_form(row.measure, score.low, score.high)
    value = f"<b>{form(score.value)}</b>" if score is row.after else form(score.value)
    return f'<td class="number">{value}<small>{interval(score.low, score.high, form)}</small></td>'


def _closing_row(closing: ClosingTable, row: ClosingRow) -> str:
    kind = ' class="after"' if row is closing.after else ""
    bits = "–" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}"
    return (
        f"<tr{kind}><td>{escape(row.name)}<small>{escape(row.note)}</small></td>"
        f'<td class="number">{bits}</td><td class="number">{_change_html(closing, row)}</td></tr>'
    )


def _change_html(closing: ClosingTable, row: ClosingRow) -> str:
    ratio = closing.change(row)
    if ratio is None:
        return ""
    return f'<span class="{"good" if ratio < 0 else "bad"}">{change(ratio).replace("-", "−")}</span>'


def _facts_section(title: str, facts: list[Fact]) -> str:
    if not facts:
        return ""
    items = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in facts)
    return f'<section class="{title.lower()}"><h2>{title}</h2><dl>{items}</dl></section>'


def _config_section(config_text: str) -> str:
    if not config_text:
        return ""
    return f"<section><details><summary>config.yaml</summary><pre>{escape(config_text)}</pre></details></section>"
