"""Questions with answers: what every set becomes, and how it is written."""

import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nemo_opd.config.reward import MathReward
from nemo_opd.errors import DataError
from nemo_opd.files import write_atomically
from nemo_opd.rewards import check_answer
from tools.data.rows import Row

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
OUTPUTS = (".parquet", ".jsonl")


@dataclass(frozen=True, slots=True)
class Question:
    source: str
    """Name of the set."""
    id: str
    problem: str
    answer: str
    solution: str | None = None
    subject: str | None = None
    level: str | None = None


@dataclass(frozen=True, slots=True)
class Distinct:
    questions: list[Question]
    num_repeated: int
    """Rows whose problem came before."""
    num_contradicting: int
    """Problems left out because they have several answers."""


def checked(row: Row, question: Question) -> Question:
    """Raises DataError, with the row, for an answer that no reward could compare with."""
    try:
        check_answer(MathReward(), question.answer)
    except DataError as error:
        raise row.error(str(error)) from None
    return question


def distinct(questions: Iterable[Question]) -> Distinct:
    """The first of each problem, in order."""
    first: dict[str, Question] = {}
    contradicted: set[str] = set()
    num_rows = 0
    for question in questions:
        num_rows += 1
        known = first.setdefault(question.problem, question)
        if known.answer != question.answer:
            contradicted.add(question.problem)
    kept = [question for problem, question in first.items() if problem not in contradicted]
    return Distinct(kept, num_rows - len(first), len(contradicted))


def check_output(path: Path) -> None:
    """Raises DataError for a name that says no format."""
    if path.suffix not in OUTPUTS:
        raise DataError(f"--output {path}: give a name that ends in {' or '.join(OUTPUTS)}")


def write(questions: Iterable[Question], path: Path, *, instruction: str, as_text: bool) -> None:
    """Parquet or JSON lines by the name, whole or not at all. `instruction` follows each problem."""
    records = [record(question, instruction, as_text=as_text) for question in questions]
    empty = {name for name in records[0] if all(each[name] is None for each in records)}
    records = [{name: value for name, value in each.items() if name not in empty} for each in records]
    write_atomically(path, parquet(records) if path.suffix == ".parquet" else json_lines(records))


def record(question: Question, instruction: str, *, as_text: bool) -> dict[str, Any]:
    prompt = f"{question.problem}\n\n{instruction}" if instruction else question.problem
    content = {"text": f"{prompt}\n\n"} if as_text else {"messages": [{"role": "user", "content": prompt}]}
    return content | {
        "answer": question.answer,
        "source": question.source,
        "id": question.id,
        "subject": question.subject,
        "level": question.level,
        "solution": question.solution,
    }


def parquet(records: list[dict[str, Any]]) -> bytes:
    schema = pa.schema([(name, MESSAGES if name == "messages" else pa.string()) for name in records[0]])
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records, schema), buffer)
    return buffer.getvalue()


def json_lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records).encode()
