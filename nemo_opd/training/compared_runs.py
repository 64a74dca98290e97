"""Question-by-question comparison of several runs."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_opd.logging.facts import number_of_set, read_config
from nemo_opd.logging.formats import difference, is_share
from nemo_opd.logging.group_tables import NOTHING, TextTable
from nemo_opd.logging.question_values import QuestionValues, read_values
from nemo_opd.logging.sweep import SweptRun
from nemo_opd.training.scores import difference_between


def answer_tables(runs: Sequence[SweptRun]) -> list[TextTable]:
    """Tabulate how much better each run's last evaluation is than the first run's, per measure.

    Return an empty list if no run answered the same questions as the first. Raises DataError for a damaged file.
    """
    first, *compared = runs
    baseline, *values_of_runs = (_last_values(run) for run in runs)
    config = read_config(first.folder)
    rows = []
    for (name, measure), reference in baseline.items():
        confidence = number_of_set(config, name, "confidence")
        cells = []
        for run_values in values_of_runs:
            values = run_values.get((name, measure))
            gain = None if values is None else difference_between(values, reference, measure, confidence)
            is_fraction = is_share(measure, *reference.values[measure])
            cells.append(NOTHING if gain is None else difference(*gain, is_share=is_fraction))
        rows.append([f"{name}/{measure}" if name else measure, *cells])
    rows = [row for row in rows if set(row[1:]) != {NOTHING}]
    heads = ["", *(run.name for run in compared)]
    return [TextTable(f"Answers, better than {first.name} by", heads, rows)] if rows and compared else []


def _last_values(run: SweptRun) -> dict[tuple[str, str], QuestionValues]:
    """Return the student's last values, keyed by set and measure."""
    logged = (values for values in read_values(run.folder / "evaluation.jsonl") if values.teacher is None)
    return {(values.set, measure): values for values in logged for measure in values.values}
