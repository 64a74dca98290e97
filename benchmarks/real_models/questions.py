"""Questions of the real-model benchmark: which line follows, and sums as conversations."""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from benchmarks.real_models.texts import Document
from nemo_opd.files import write_atomically

TASK = "which_line"
_NUM_CHOICES = 4
_CONTEXT_CHARS, _LINE_CHARS = 240, range(24, 72)


def which_line(found: Sequence[Document], number: int) -> list[dict[str, object]]:
    """Return passages, each with the line that follows it among three other lines of the same document."""
    chosen = random.Random(0)
    rows = []
    for document in sorted(found, key=lambda document: document.rank):
        lines = document.text.split("\n")
        usable = [i for i, line in enumerate(lines) if len(line.strip()) in _LINE_CHARS and i > 2]
        choices = list(dict.fromkeys(lines[i] for i in usable))
        if not document.is_validation or len(choices) < 2 * _NUM_CHOICES:
            continue
        place = chosen.choice(usable[: len(usable) // 2])
        context = "\n".join(lines[:place])[-_CONTEXT_CHARS:] + "\n"
        others = chosen.sample([line for line in choices if line != lines[place] and line not in context], 3)
        answer = chosen.randrange(_NUM_CHOICES)
        choices = [*others[:answer], lines[place], *others[answer:]]
        rows.append({"context": context, "choices": choices, "answer": answer, "domain": document.domain})
        if len(rows) == number:
            break
    return rows


def write_sums(folder: Path, num_train: int, num_held_out: int) -> None:
    """Write sums of two numbers of two digits: `sums_train.jsonl` and `sums_held_out.jsonl`, which share none."""
    drawn = sorted(product(range(10, 100), repeat=2), key=_rank)
    for name, pairs in (
        ("sums_held_out", drawn[:num_held_out]),
        ("sums_train", drawn[num_held_out : num_held_out + num_train]),
    ):
        lines = [json.dumps(row) for row in _sums(pairs)]
        write_atomically(folder / f"{name}.jsonl", ("\n".join(lines) + "\n").encode())


def _rank(pair: tuple[int, int]) -> str:
    return hashlib.sha256(f"{min(pair)} + {max(pair)}".encode()).hexdigest()  # a + b and b + a are in one split


def _sums(pairs: Sequence[tuple[int, int]]) -> Iterator[dict[str, object]]:
    for first, second in pairs:
        total = first + second
        question = f"{first} + {second} ="
        solution = f"{first} + {second} = {total}"
        yield {"messages": [{"role": "user", "content": question}], "answer": str(total), "solution": solution}
