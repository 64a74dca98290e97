"""samples.jsonl: answers of the student and its teachers at evaluations, one JSON object per answer."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from nemo_opd.disk import storage_errors
from nemo_opd.files import write_atomically
from nemo_opd.logging.jsonl import parse_lines


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """One answer to one question, for readers."""

    step: int
    """Optimizer steps that the student had taken."""
    question: int
    """Row of the prompt."""
    kind: Literal["greedy", "sampled"]
    sample: int
    """Index among the sampled answers; 0 for the greedy one."""
    prompt: str
    answer: str | None
    """Reference answer."""
    response: str
    reward: float
    finish_reason: str
    num_tokens: int
    """Sampled tokens, in the tokenizer of the model that answered."""
    teacher: str | None = None
    """Name of the teacher that answered, or None for the student."""
    set: str = ""
    """Name of the question set; empty for the unnamed one."""


_ANSWER = TypeAdapter(ShownAnswer)


class SampleLog:
    """Appends answers to samples.jsonl, which is created with the first one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def truncate_after(self, step: int) -> None:
        """Drop answers after `step` (all if it is 0, as step 0 is evaluated again) and a torn last line.

        Raises DataError if the file is damaged.
        """
        if self.path.exists():
            write_samples(self.path, (answer for answer in read_samples(self.path) if step and answer.step <= step))

    def write(self, answers: Iterable[ShownAnswer]) -> None:
        """Append answers. Raises StorageError if the file cannot be written."""
        with storage_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_lines(answers))


def write_samples(path: Path, answers: Iterable[ShownAnswer]) -> None:
    """Replace the file atomically."""
    write_atomically(path, _lines(answers).encode())


def _lines(answers: Iterable[ShownAnswer]) -> str:
    # Readable, except for lone surrogates, which byte-level tokenizers produce and UTF-8 cannot encode.
    return "".join(
        json.dumps(asdict(answer), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace").decode() + "\n"
        for answer in answers
    )


def read_samples(path: Path) -> list[ShownAnswer]:
    """Return the answers in the order written, without a torn last line.

    Raises DataError for any other invalid line.
    """
    answers = parse_lines(path, path.read_bytes().split(b"\n"), _parse, "not an answer")
    return [answer for answer in answers if answer is not None]


def _parse(line: bytes) -> ShownAnswer | None:
    return _ANSWER.validate_json(line, strict=True) if line else None


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
