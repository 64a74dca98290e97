"""The demo's benchmark, which asks which of four lines follows a passage of the validation text.

It is a folder with an lm-eval task (YAML) and its questions (JSON), built on first use.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from nemo_opd.demo import corpus
from nemo_opd.files import write_atomically

TASK = "next_line"
_NUM_QUESTIONS = 64
_NUM_CHOICES = 4
_CONTEXT_CHARS, _LINE_CHARS = 160, range(24, 64)

_TASK = """\
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {questions}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
target_delimiter: ""
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1
"""


def task_folder() -> Path:
    """Return the folder; build it if absent. Raises DataError as `corpus.arrow_file` does. Processes can share it."""
    source = corpus.arrow_file("validation")
    name = hashlib.sha256(f"1 {_NUM_QUESTIONS} {source.parent.name}".encode()).hexdigest()[:12]
    folder = source.parent / f"tasks-{name}"
    if not (folder / f"{TASK}.yaml").exists():
        with pa.memory_map(str(source)) as file:
            texts = pa.ipc.open_stream(file).read_all().column("text").to_pylist()
        write_task(folder, TASK, _questions(texts))
    return folder


def write_task(folder: Path, task: str, questions: Iterable[Mapping[str, Any]]) -> None:
    """Write a multiple-choice task of questions with `context`, `choices` and `answer`, the index of the right one."""
    rows, path = [json.dumps(question) for question in questions], folder / f"{task}.json"
    write_atomically(path, ("\n".join(rows) + "\n").encode())
    text = _TASK.format(task=task, questions=json.dumps(str(path.resolve())))
    write_atomically(folder / f"{task}.yaml", text.encode())


def _questions(texts: list[str]) -> Iterator[dict[str, object]]:
    """Yield passages, with the line that follows each hidden among lines of other passages."""
    generator = random.Random(0)
    passages = [passage for passage in map(_split, texts) if passage is not None][: _NUM_QUESTIONS * _NUM_CHOICES]
    for context, line in passages[:_NUM_QUESTIONS]:
        wrong = generator.sample([choice for _, choice in passages if choice != line], _NUM_CHOICES - 1)
        answer = generator.randrange(_NUM_CHOICES)
        yield {"context": context, "choices": [*wrong[:answer], line, *wrong[answer:]], "answer": answer}


def _split(text: str) -> tuple[str, str] | None:
    """Return the end of the text before a line in its middle, and that line; None if it is too short or too long."""
    middle = len(text) // 2
    line_end, _, following = text[middle:].partition("\n")
    line, has_more, _ = following.partition("\n")
    context = text[:middle] + line_end + "\n"
    fits = has_more and len(line.strip()) in _LINE_CHARS
    return (context[-_CONTEXT_CHARS:], line) if fits else None
