"""samples.jsonl: what the student and its teachers answered when they were evaluated, one JSON object an answer."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from nemo_opd.disk import storage_errors
from nemo_opd.errors import DataError
from nemo_opd.files import write_atomically
from nemo_opd.problems import first_problem

Place = tuple[int, str, int]
"""Question, kind and sample."""


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """One answer to one question, for people to read."""

    step: int
    """Optimizer steps that the student had seen."""
    question: int
    """The row of the prompt."""
    kind: Literal["greedy", "sampled"]
    sample: int
    """Which of the sampled answers; 0 for the greedy one."""
    prompt: str
    answer: str | None
    """What it is compared with."""
    response: str
    reward: float
    finish_reason: str
    num_tokens: int
    """That were sampled, in the tokenizer of the one who answered."""
    teacher: str | None = None
    """The name of the teacher that answered; None: the student did."""

    @property
    def place(self) -> Place:
        """What is the same in evaluations of different steps and models."""
        return self.question, self.kind, self.sample


ANSWER = TypeAdapter(ShownAnswer)


class SampleLog:
    """Appends answers to samples.jsonl, which appears with the first of them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def truncate_after(self, step: int) -> None:
        """Drops answers after `step` (all where it is 0, for step 0 is evaluated again) and a torn last line.

        Raises DataError where the file is damaged.
        """
        if self.path.exists():
            kept = [answer for answer in read_samples(self.path) if step and answer.step <= step]
            write_atomically(self.path, _lines(kept).encode())

    def write(self, answers: Iterable[ShownAnswer]) -> None:
        """Raises StorageError where the file does not take them."""
        with storage_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_lines(answers))


def write_samples(path: Path, answers: Iterable[ShownAnswer]) -> None:
    """Replaces the file at once."""
    write_atomically(path, _lines(answers).encode())


def _lines(answers: Iterable[ShownAnswer]) -> str:
    # Kept readable, but for lone surrogates, which a byte-level tokenizer may bring and UTF-8 has not.
    return "".join(
        json.dumps(asdict(answer), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace").decode() + "\n"
        for answer in answers
    )


def read_samples(path: Path) -> list[ShownAnswer]:
    """In the order written; a torn last line is left out. Raises DataError at any other line that is no answer."""
    lines = path.read_bytes().split(b"\n")
    answers = []
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                answers.append(ANSWER.validate_json(line, strict=True))
        except ValidationError as error:
            if number == len(lines):
                break
            reason = first_problem(error)
            raise DataError(f"{path}, line {number} is no answer ({reason}); remove or repair it") from error
    return answers


def first_and_last(answers: Sequence[ShownAnswer]) -> dict[int, dict[Place, ShownAnswer]]:
    """The student's answers by their place, of the first evaluation and of the last, by step; empty without any."""
    own = [answer for answer in answers if answer.teacher is None]
    steps = sorted({answer.step for answer in own})
    ends = dict.fromkeys((*steps[:1], *steps[-1:]))
    return {step: {answer.place: answer for answer in own if answer.step == step} for step in ends}


def by_teacher(answers: Sequence[ShownAnswer]) -> dict[str, dict[Place, ShownAnswer]]:
    """What each teacher answered by its place, in the order in which they were asked."""
    names = dict.fromkeys(answer.teacher for answer in answers if answer.teacher is not None)
    return {name: {answer.place: answer for answer in answers if answer.teacher == name} for name in names}
