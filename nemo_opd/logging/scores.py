"""Scores on questions and validation texts: evaluation.jsonl, samples.jsonl, validation.jsonl, and tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Generic, Literal, TypeVar

from pydantic import TypeAdapter

from nemo_opd.files import open_unlinked, read_data, storage_errors, write_atomically
from nemo_opd.logging.interface import is_mean, is_share, share
from nemo_opd.logging.loggers import parse_lines
from nemo_opd.logging.records import NOTHING, TextTable, by_size

SAMPLE_LOG, VALIDATION_LOG = "samples.jsonl", "validation.jsonl"
_Values = Mapping[str, float]
"""Share of right answers by question."""
_LEVELS = ("never right at the start", "up to a third", "up to two thirds", "more than two thirds", "always right")
_MOST_SHOWN = 20
"""Largest number of question rows, and of levels, in a table."""
_OTHERS = "others"


@dataclass(frozen=True, slots=True)
class QuestionValues:
    """Values per question, whose means are a model's figures for a set."""

    step: int
    """Optimizer steps that the student had taken."""
    set: str
    """Name of the set; empty for the unnamed one."""
    teacher: str | None
    """Name of the teacher that answered, or None for the student."""
    questions: tuple[str, ...]
    """Row and a digest of each question: equal if the same question was asked."""
    values: Mapping[str, tuple[float, ...]]
    """Values by measure, such as `pass@1`, in the order of the questions."""
    lower_is_better: tuple[str, ...] = ()
    """Measures with lower values for better answers."""
    levels: tuple[str, ...] = ()
    """Difficulty or kind of each question, in order; empty without a level column."""


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """One answer to one question, for readers."""

    step: int
    """Optimizer steps that the student had taken."""
    question: int
    """Row of the prompt."""
    kind: Literal["greedy", "sampled", "continued"]
    """`continued`: of a validation text, whose start is the prompt and whose rest is the answer."""
    sample: int
    """Index among the sampled answers; 0 for the greedy one."""
    prompt: str
    answer: str | None
    """Reference answer."""
    response: str
    reward: float | None
    """None for continued texts."""
    finish_reason: str
    num_tokens: int
    """Sampled tokens, in the tokenizer of the model that answered."""
    teacher: str | None = None
    """Name of the teacher that answered, or None for the student."""
    set: str = ""
    """Name of the question set; empty for the unnamed one."""


@dataclass(frozen=True, slots=True)
class TextBits:
    """The student's bits for each validation text."""

    step: int
    """Optimizer steps that the student had taken."""
    bits: tuple[float, ...]
    num_bytes: tuple[int, ...]

    @property
    def per_byte(self) -> float:
        return sum(self.bits) / sum(self.num_bytes)


_Line = TypeVar("_Line", QuestionValues, ShownAnswer, TextBits)


class _LineLog(Generic[_Line]):
    """A JSON Lines file of a run, which is created with its first line."""

    kind: type[_Line]
    problem: str
    """What an invalid line is."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[_Line]:
        """Return the lines in the order written, without a torn last line; empty without a file.

        Raises DataError for any other invalid line.
        """
        adapter = TypeAdapter(self.kind)
        lines = read_data(self.path).split(b"\n")
        parsed: list[_Line | None] = parse_lines(
            self.path, lines, lambda line: adapter.validate_json(line, strict=True) if line else None, self.problem
        )
        return [line for line in parsed if line is not None]

    def truncate_after(self, step: int) -> None:
        """Drop lines after `step` (all if it is 0, as step 0 is evaluated again) and a torn last one.

        Raises DataError if the file is damaged.
        """
        if self.path.exists():
            self.replace(line for line in self.read() if step and line.step <= step)

    def write(self, lines: Iterable[_Line]) -> None:
        """Append lines. Raises StorageError if the file cannot be written."""
        with storage_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open_unlinked(self.path, "a") as file:
                file.write("".join(map(_json_line, lines)))

    def replace(self, lines: Iterable[_Line]) -> None:
        """Replace the file atomically."""
        write_atomically(self.path, "".join(map(_json_line, lines)).encode())


class ValueLog(_LineLog[QuestionValues]):
    """evaluation.jsonl."""

    kind, problem = QuestionValues, "not question values"


class SampleLog(_LineLog[ShownAnswer]):
    """samples.jsonl."""

    kind, problem = ShownAnswer, "not an answer"

    def write_continued(self, step: int, continued: Sequence[ShownAnswer]) -> None:
        """Write the continued texts of a step, and drop those of earlier steps, except at step 0."""
        earlier = [line for line in self.read() if line.kind != "continued" or (step and not line.step)]
        self.replace([*earlier, *continued])


class TextLog(_LineLog[TextBits]):
    """validation.jsonl: the first and the last validation."""

    kind, problem = TextBits, "not the bits of validation texts"

    def add(self, line: TextBits) -> None:
        """Add a validation and drop earlier ones, except at step 0."""
        start = [earlier for earlier in self.read() if not earlier.step and line.step]
        self.replace([*start, line])

    def at(self, step: int) -> TextBits | None:
        return next((line for line in self.read() if line.step == step), None)


def _json_line(line: QuestionValues | ShownAnswer | TextBits) -> str:
    # Readable, except for lone surrogates, which byte-level tokenizers produce and UTF-8 cannot encode.
    text = json.dumps(asdict(line), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace").decode() + "\n"


def answers_by_question(answers: Sequence[ShownAnswer]) -> list[dict[str, ShownAnswer | None]]:
    """Return for each question and kind of sample the answers by model; None if a model was not asked.

    The models are the student at its first and last evaluations, then the teachers in the order asked.
    """
    steps = sorted({answer.step for answer in answers if answer.teacher is None})
    models: dict[str, dict[object, ShownAnswer]] = {_model(None, step): {} for step in (*steps[:1], *steps[-1:])}
    models |= {_model(answer.teacher, 0): {} for answer in answers if answer.teacher is not None}
    for answer in answers:
        if (model := _model(answer.teacher, answer.step)) in models:
            models[model][answer.set, answer.question, answer.kind, answer.sample] = answer
    samples = dict.fromkeys(sample for by_sample in models.values() for sample in by_sample)
    return [{model: by_sample.get(sample) for model, by_sample in models.items()} for sample in samples]


def _model(teacher: str | None, step: int) -> str:
    return f"student after step {step:,}" if teacher is None else f"teacher {teacher}"


def answer_tables(values: Sequence[QuestionValues]) -> list[TextTable]:
    """Return the tables of each set that the student answered at least twice."""
    tables: list[TextTable] = []
    for name in dict.fromkeys(line.set for line in values):
        of_set = [line for line in values if line.set == name]
        measures = dict.fromkeys(measure for line in of_set for measure in line.values)
        shares = [measure for measure in measures if is_share(measure) and not is_mean(measure)]
        sampled = next((measure for measure in shares if measure == "pass@1"), next(iter(shares), None))
        single = "greedy" if "greedy" in shares else sampled
        if sampled is None:
            continue
        candidates = (
            _by_difficulty(name, sampled, of_set),
            _by_level(name, sampled, of_set),
            _changed(name, single, of_set),
        )
        tables += [table for table in candidates if table is not None]
    return tables


def _answers(measure: str, values: Sequence[QuestionValues], teacher: str | None) -> list[tuple[int, _Values]]:
    """Return (step, values by question) of each evaluation of a model, if all values are between 0 and 1."""
    evaluations = [
        (line.step, dict(zip(line.questions, line.values[measure], strict=True)))
        for line in values
        if line.teacher == teacher and measure in line.values
    ]
    return [(step, answers) for step, answers in evaluations if all(0 <= value <= 1 for value in answers.values())]


def _by_difficulty(name: str, measure: str, values: Sequence[QuestionValues]) -> TextTable | None:
    """Return the means over questions with the same share of right samples at the student's first evaluation."""
    (_, first), *_ = _answers(measure, values, None) or [(0, {})]
    groups = {label: [row for row, value in first.items() if _level(value) == i] for i, label in enumerate(_LEVELS)}
    return _means(f"{_title(name, measure)} by difficulty", groups, measure, values)


def _by_level(name: str, measure: str, values: Sequence[QuestionValues]) -> TextTable | None:
    """Return the means over questions with the same level: the most frequent levels, then a row for all other ones."""
    level_of = {row: level for line in values for row, level in zip(line.questions, line.levels, strict=False)}
    frequent = [level for level, _ in Counter(level_of.values()).most_common(_MOST_SHOWN)]
    groups: dict[str, list[str]] = {level: [] for level in sorted(frequent, key=by_size)}
    for row, level in level_of.items():
        groups.setdefault(level if level in frequent else _OTHERS, []).append(row)
    return _means(f"{_title(name, measure)} by level", groups, measure, values)


def _means(
    title: str, groups: Mapping[str, Sequence[str]], measure: str, values: Sequence[QuestionValues]
) -> TextTable | None:
    """Return the means over groups of questions, of the student before and after and of its teachers."""
    student = _answers(measure, values, None)
    if len(student) < 2 or not any(groups.values()):
        return None
    (_, first), (last_step, last) = student[0], student[-1]
    names = dict.fromkeys(line.teacher for line in values if line.teacher is not None)
    teachers = {teacher: answers[-1][1] for teacher in names if (answers := _answers(measure, values, teacher))}
    rows = [
        [label, f"{len(rows):,}", *(_mean(rows, model) for model in (first, last, *teachers.values()))]
        for label, rows in groups.items()
        if rows
    ]
    heads = ["", "questions", "before", f"after step {last_step:,}", *(f"teacher {teacher}" for teacher in teachers)]
    return TextTable(title, heads, rows)


def _level(value: float) -> int:
    if value in (0, 1):
        return 0 if value == 0 else len(_LEVELS) - 1
    return 1 + (value > 1 / 3 + 1e-9) + (value > 2 / 3 + 1e-9)


def _mean(questions: Sequence[str], values: _Values) -> str:
    answered = [values[row] for row in questions if row in values]
    return share(fmean(answered)) if answered else NOTHING


def _changed(name: str, measure: str | None, values: Sequence[QuestionValues]) -> TextTable | None:
    """Return questions by whether the first and last answers were right, i.e. at least half of the samples were."""
    student = [answers for _, answers in _answers(measure, values, None)] if measure else []
    if len(student) < 2:
        return None
    common = [row for row in student[0] if all(row in answers for answers in student)]
    right = {row: [answers[row] >= 0.5 for answers in student] for row in common}
    kinds = {
        "wrong, now right": [row for row, seen in right.items() if not seen[0] and seen[-1]],
        "right, now wrong": [row for row, seen in right.items() if seen[0] and not seen[-1]],
        "right in between, wrong again": [
            row for row, seen in right.items() if not (seen[0] or seen[-1]) and any(seen)
        ],
        "wrong in between, right again": [row for row, seen in right.items() if seen[0] and seen[-1] and not all(seen)],
        "right throughout": [row for row, seen in right.items() if all(seen)],
        "wrong throughout": [row for row, seen in right.items() if not any(seen)],
    }
    changes = sum(now != then for seen in right.values() for then, now in pairwise(seen))
    rows = [
        [kind, f"{len(questions):,}", "" if kind.endswith("throughout") else _listed(questions)]
        for kind, questions in kinds.items()
        if questions
    ]
    rows.append(["changes from one evaluation to the next", f"{changes:,}", ""])
    return TextTable(f"{_title(name, measure or '')}: answers that changed", ["", "questions", "rows"], rows)


def _title(name: str, measure: str) -> str:
    return f"Questions{f' of {name}' * bool(name)}, {measure}"


def _listed(rows: Sequence[str]) -> str:
    listed = ", ".join(row.rpartition(":")[0] for row in rows[:_MOST_SHOWN])
    return f"{listed}, …" if len(rows) > _MOST_SHOWN else listed
