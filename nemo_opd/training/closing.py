"""The closing table of a run, and differences between models that answered the same questions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nemo_opd.config.run import RunConfig
from nemo_opd.errors import DataError
from nemo_opd.evaluation.estimates import paired_difference
from nemo_opd.evaluation.verdict import Arm, Setup, compared, gain_over, judge, teacher_effect
from nemo_opd.logging.comparison import SweptRun
from nemo_opd.logging.interface import (
    STUDENT_AFTER,
    STUDENT_BEFORE,
    ClosingRow,
    ClosingTable,
    Score,
    ScoreRow,
    Verdict,
    difference,
    is_mean,
    is_share,
)
from nemo_opd.logging.loggers import read
from nemo_opd.logging.metrics import BITS_PER_BYTE, PREFIX, SHARED_BITS_PER_BYTE, score_keys
from nemo_opd.logging.provenance import read_provenance
from nemo_opd.logging.records import BASELINE, NOTHING, TextTable, number_of_set, read_config, value_at
from nemo_opd.logging.scores import VALIDATION_LOG, QuestionValues, TextLog, ValueLog

_Record = Mapping[str, float]


def closing_table(
    config: RunConfig,
    folder: Path,
    start: _Record,
    end: _Record,
    steps: int,
    *,
    is_end: bool = True,
) -> ClosingTable:
    """Build the closing table: bits per byte and scores of student and teachers.

    folder: the run's directory. start: bits per byte before the first step, with the teachers' figures; end: after
    `steps`. Both are keyed by logged name, and empty if not measured. is_end: report the trained student's last scores;
    otherwise only scores measured at exactly `steps`.
    """

    def student(name: str, record: _Record, note: str = "") -> ClosingRow | None:
        bits = record.get(BITS_PER_BYTE)
        return None if bits is None else ClosingRow(name, bits, note, record.get(SHARED_BITS_PER_BYTE))

    teachers = [
        ClosingRow(f"teacher {teacher.name}", None, teacher.type.replace("_", " "), shared)
        for teacher in config.active_teachers
        if (shared := start.get(f"{SHARED_BITS_PER_BYTE}/{teacher.name}")) is not None
    ]
    baseline_run = baseline_folder(config, folder)
    arm = _arm(folder, "this run", steps)
    baseline = None if baseline_run is None else _arm(baseline_run, str(baseline_run))
    closing = ClosingTable(
        before=student(STUDENT_BEFORE, start),
        after=student(STUDENT_AFTER, end, f"{steps} steps"),
        baseline=_baseline_row(arm, baseline),
        teachers=tuple(teachers),
        scores=_scores_at(config, folder, None if is_end else steps),
    )
    return replace(closing, verdict=_verdict(config, folder, closing, steps, arm, baseline))


def _baseline_row(arm: Arm, baseline: Arm | None) -> ClosingRow | None:
    """Return the row of the run without teachers, if the two runs compare."""
    if baseline is None or baseline.end is None or isinstance(gain_over(arm, baseline), str):
        return None
    return ClosingRow("student without teachers", baseline.end.per_byte, f"{baseline.end.step} steps")


def _verdict(
    config: RunConfig, folder: Path, closing: ClosingTable, steps: int, arm: Arm, baseline: Arm | None
) -> Verdict:
    records = [record for record in read(folder / "metrics.jsonl") if record["step"] <= steps]
    provenance = read_provenance(folder)
    models = () if provenance is None else provenance.models
    setup = Setup(
        config.active_names,
        {model.name: model.parameters for model in models if model.parameters is not None},
        None if provenance is None else provenance.num_texts,
    )
    return judge(closing, records, setup, arm, baseline)


def baseline_folder(config: RunConfig, folder: Path) -> Path | None:
    """Return the directory of the run without teachers; None if there is none. folder: this run's."""
    baseline = config.run.baseline
    return baseline if isinstance(baseline, Path) else folder / BASELINE if baseline else None


def _arm(folder: Path, name: str, steps: int | None = None) -> Arm:
    """Return a run's validation per text. steps: step of the last one; by default the last that was written."""
    by_step = {line.step: line for line in TextLog(folder / VALIDATION_LOG).read()}
    end = by_step.get(max(by_step, default=0) if steps is None else steps)
    records: Sequence[_Record] = ()
    with suppress(DataError):  # without them, runs are compared by their texts alone
        records = read(folder / "metrics.jsonl")
    rates = {record["step"]: record["train/lr"] for record in records if "train/lr" in record}
    return Arm(name, by_step.get(0), end, read_config(folder), rates)


def comparison_sentences(runs: Sequence[SweptRun]) -> list[str]:
    """Say for each run with teachers whether they helped, compared with the first run without any, and if it is better
    than the first one with teachers.
    """
    has_teachers = {run.name: bool(value_at(read_config(run.folder), "loss.kd_weight")) for run in runs}
    baseline = next((_arm(run.folder, run.name) for run in runs if not has_teachers[run.name]), None)
    arms = [_arm(run.folder, run.name) for run in runs if has_teachers[run.name]]
    if not arms:
        return []
    effects = ["Whether teachers helped cannot be told: none of these runs is without teachers."]
    if baseline is not None:
        effects = [f"{arm.name}, compared with {baseline.name}: {teacher_effect(arm, baseline)[1]}" for arm in arms]
    return [*effects, *filter(None, (compared(arm, arms[0]) for arm in arms[1:]))]


def closing_at(config: RunConfig, folder: Path, start: _Record, step: int) -> ClosingTable:
    """Build the closing table as if the run had ended at a step. start: as for `closing_table`."""
    return closing_table(config, folder, start, _measured_at(read(folder / "metrics.jsonl"), step), step, is_end=False)


def _scores_at(config: RunConfig, folder: Path, step: int | None) -> tuple[ScoreRow, ...]:
    if config.evaluation is None:
        return ()
    records, values = read(folder / "metrics.jsonl"), ValueLog(folder / "evaluation.jsonl").read()
    if step is not None:
        records = [record for record in records if record["step"] <= step]
    settings = config.evaluation
    rows = scores(records, config.active_names, values, lambda name: settings.all_sets.get(name, settings).confidence)
    last = records if step is None else [_measured_at(records, step)]
    measured = {key for record in last if record.get("step") for key in record}
    return tuple(row for row in rows if f"{PREFIX}{row.measure}" in measured)


def _measured_at(records: Sequence[Mapping[str, float]], step: int) -> Mapping[str, float]:
    return next((record for record in records if record["step"] == step), {})


def scores(
    records: Sequence[_Record],
    teachers: Sequence[str],
    values: Sequence[QuestionValues],
    confidence: Callable[[str], float],
) -> tuple[ScoreRow, ...]:
    """Return a row for each measure with a confidence interval in a run's records.

    teachers: names. values: values per question, for differences between models that answered the same questions.
    confidence: function from the name of a set to the level of its intervals.
    """
    keys = dict.fromkeys(key for record in records for key in record)
    return tuple(_row(key, records, teachers, values, confidence) for key in score_keys(keys))


def _row(
    key: str,
    records: Sequence[_Record],
    teachers: Sequence[str],
    values: Sequence[QuestionValues],
    confidence: Callable[[str], float],
) -> ScoreRow:
    first, *_, last = [record for record in records if key in record] * 2
    teacher_scores = {
        teacher: _score(record, key, f"/{teacher}")
        for teacher in teachers
        for record in records
        if f"{key}/{teacher}" in record
    }
    has_before = first["step"] < last["step"]
    name = key.removeprefix(PREFIX)
    set_name, _, measure = name.rpartition("/")
    steps = first["step"], last["step"]
    return ScoreRow(
        name,
        _score(first, key) if has_before else None,
        _score(last, key),
        teacher_scores,
        _differences(set_name, measure, values, steps, confidence(set_name)),
    )


def _score(record: _Record, key: str, suffix: str = "") -> Score:
    return Score(record[f"{key}{suffix}"], record[f"{key}_low{suffix}"], record[f"{key}_high{suffix}"])


def _differences(
    set_name: str, measure: str, values: Sequence[QuestionValues], steps: tuple[float, float], confidence: float
) -> dict[str, Score]:
    """Return how much better the student is at the second of two steps than at the first, and than each teacher."""
    entries = [entry for entry in values if entry.set == set_name and measure in entry.values]
    student_by_step: dict[float, QuestionValues] = {entry.step: entry for entry in entries if entry.teacher is None}
    after = student_by_step.get(steps[1])
    if after is None:
        return {}
    baselines = {f"teacher {entry.teacher}": entry for entry in entries if entry.teacher is not None}
    if steps[0] < steps[1] and steps[0] in student_by_step:
        baselines[STUDENT_BEFORE] = student_by_step[steps[0]]
    differences = {
        name: _difference_between(after, baseline, measure, confidence) for name, baseline in baselines.items()
    }
    return {name: difference for name, difference in differences.items() if difference is not None}


def _difference_between(
    after: QuestionValues, baseline: QuestionValues, measure: str, confidence: float
) -> Score | None:
    """Return how much better `after` is on the questions that both answered; None if these are too few."""
    baseline_values = dict(zip(baseline.questions, baseline.values[measure], strict=True))
    after_values = dict(zip(after.questions, after.values[measure], strict=True))
    shared = [row for row in after_values if row in baseline_values]
    if not shared:
        return None
    pairs = [after_values[row] for row in shared], [baseline_values[row] for row in shared]
    difference = paired_difference(*pairs, confidence)
    if not math.isfinite(difference.low):
        return None
    if measure in after.lower_is_better:
        return Score(-difference.value, -difference.high, -difference.low)
    return Score(difference.value, difference.low, difference.high)


def answer_tables(runs: Sequence[SweptRun]) -> list[TextTable]:
    """Tabulate how much better each run's last evaluation is than the first run's, per measure.

    Return an empty list if no run answered the same questions as the first. Raises DataError for a damaged file.
    """
    first, *compared = runs
    baseline, *values_of_runs = (_last_values(run) for run in runs)
    config = read_config(first.folder)
    rows = []
    for (name, measure), reference in baseline.items():
        answered = [reference, *(values[name, measure] for values in values_of_runs if (name, measure) in values)]
        if is_mean(measure) and all(values.values[measure] == values.values.get("pass@1") for values in answered):
            continue
        confidence = number_of_set(config, name, "confidence")
        cells = []
        for run_values in values_of_runs:
            values = run_values.get((name, measure))
            gain = None if values is None else _difference_between(values, reference, measure, confidence)
            is_fraction = is_share(measure, *reference.values[measure])
            cells.append(NOTHING if gain is None else difference(*gain, is_share=is_fraction))
        rows.append([f"{name}/{measure}" if name else measure, *cells])
    rows = [row for row in rows if set(row[1:]) != {NOTHING}]
    heads = ["", *(run.name for run in compared)]
    return [TextTable(f"Answers, better than {first.name} by", heads, rows)] if rows and compared else []


def _last_values(run: SweptRun) -> dict[tuple[str, str], QuestionValues]:
    """Return the student's last values, keyed by set and measure."""
    logged = (values for values in ValueLog(run.folder / "evaluation.jsonl").read() if values.teacher is None)
    return {(values.set, measure): values for values in logged for measure in values.values}
