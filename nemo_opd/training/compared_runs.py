"""The answers of several runs to the same questions, compared one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from nemo_opd.logging.formats import difference
from nemo_opd.logging.group_tables import NOTHING, TextTable
from nemo_opd.logging.question_values import QuestionValues, read_values
from nemo_opd.logging.sweep import SweptRun
from nemo_opd.training.scores import difference_between


def answer_tables(runs: Sequence[SweptRun]) -> list[TextTable]:
    """Return a table of how much better each run is than the first after its last evaluation, by measure.

    Empty where no two runs were asked the same questions. Raises DataError for a damaged evaluation.jsonl.
    """
    first, *others = runs
    settings = [_evaluation(run) for run in runs]
    last = [_last(run) for run in runs]
    confidence = float(settings[0].get("confidence", 0.95))
    rows = []
    for (name, measure), own in last[0].items():
        cells = []
        for evaluation, theirs in zip(settings[1:], last[1:], strict=True):
            is_same = (name, measure) in theirs and _data(evaluation, name) == _data(settings[0], name)
            found = difference_between(theirs[name, measure], own, measure, confidence) if is_same else None
            cells.append(NOTHING if found is None else difference(measure, *found))
        rows.append([f"{name}/{measure}" if name else measure, *cells])
    rows = [row for row in rows if set(row[1:]) != {NOTHING}]
    heads = ["", *(run.name for run in others)]
    return [TextTable(f"Answers, better than {first.name} by", heads, rows)] if rows and others else []


def _evaluation(run: SweptRun) -> dict[str, Any]:
    file = run.folder / "config.yaml"
    config = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else None
    found = config.get("evaluation") if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def _data(evaluation: dict[str, Any], name: str) -> object:
    """Return the settings that decide which questions a set has; those of all benchmarks for one of them."""
    sets = evaluation.get("sets") or {}
    if name in sets:
        return sets[name].get("data")
    return evaluation.get("benchmarks") if name else evaluation.get("data")


def _last(run: SweptRun) -> dict[tuple[str, str], QuestionValues]:
    """Return the student's last values by set and measure."""
    values = (each for each in read_values(run.folder / "evaluation.jsonl") if each.teacher is None)
    return {(each.set, measure): each for each in values for measure in each.values}
