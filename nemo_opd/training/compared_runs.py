"""The answers of several runs to the same questions, compared one by one."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_opd.logging.facts import number_of_set, read_config
from nemo_opd.logging.formats import difference, is_share
from nemo_opd.logging.group_tables import NOTHING, TextTable
from nemo_opd.logging.question_values import QuestionValues, read_values
from nemo_opd.logging.sweep import SweptRun
from nemo_opd.training.scores import difference_between


def answer_tables(runs: Sequence[SweptRun]) -> list[TextTable]:
    """Return a table of how much better each run is than the first after its last evaluation, by measure.

    Empty where no two runs were asked the same questions. Raises DataError for a damaged file.
    """
    first, *others = runs
    last = [_last(run) for run in runs]
    config = read_config(first.folder)
    rows = []
    for (name, measure), own in last[0].items():
        confidence = number_of_set(config, name, "confidence")
        cells = []
        for theirs in last[1:]:
            other = theirs.get((name, measure))
            found = None if other is None else difference_between(other, own, measure, confidence)
            cells.append(
                NOTHING if found is None else difference(*found, is_share=is_share(measure, *own.values[measure]))
            )
        rows.append([f"{name}/{measure}" if name else measure, *cells])
    rows = [row for row in rows if set(row[1:]) != {NOTHING}]
    heads = ["", *(run.name for run in others)]
    return [TextTable(f"Answers, better than {first.name} by", heads, rows)] if rows and others else []


def _last(run: SweptRun) -> dict[tuple[str, str], QuestionValues]:
    """Return the student's last values by set and measure."""
    values = (each for each in read_values(run.folder / "evaluation.jsonl") if each.teacher is None)
    return {(each.set, measure): each for each in values for measure in each.values}
