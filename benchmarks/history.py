"""How many chunks lie behind contents that the two sides read differently, by pair of tokenizers and kind of data.

uv run benchmarks/history.py --tokenizers FOLDER --corpus FILE.jsonl     # writes benchmarks/results/history.*

FOLDER holds one folder per tokenizer; FILE has lines of {"domain", "text"}. Both come from NEMO_OPD_TOKENIZERS and
NEMO_OPD_CORPUS (the folder of multidomain.jsonl) where they are not given.
"""

import argparse
import json
import os
import unicodedata
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from itertools import permutations
from pathlib import Path
from typing import Any

from demo import ROOT, commit, hardware
from transformers import PreTrainedTokenizerBase

from nemo_opd.alignment import TokenAligner
from nemo_opd.data.conversations import ChatSampleMaker
from nemo_opd.data.encoders import ChatEncoder, CrossTokenizer, Encoder
from nemo_opd.data.row_types import Conversation, Document
from nemo_opd.data.samples import Sample
from nemo_opd.data.text import TextSampleMaker
from nemo_opd.errors import AlignmentError
from nemo_opd.models.load import load_tokenizer

COMMAND = "uv run benchmarks/history.py"
UNLIMITED = 10**6
PART = 300
"""Characters of a message."""
NOTES = """\
* **left out**: of the chunks that a loss could use, those that `equal_history=text` (the default) and
  `equal_history=bytes` do not compare; `none` compares all. `bytes` leaves out what `text` does, and what lies behind
  trimmed white space and composed accents besides.
* Conversations are made of the corpus, cut every 300 characters into six messages and rendered by each tokenizer's own
  template. **cut words**: messages have the white space at their edges that the text has there; **stripped**: without.
  **thinking**: the assistant's messages hold `<think>…</think>` in their content, all of them or the last alone;
  **reasoning_content**: the same under that key. **calls**: the assistant calls a tool, which answers.
* Texts are whole documents; **decomposed** ones have their accents as combining marks.
"""

Message = dict[str, Any]


@dataclass(frozen=True)
class Row:
    kind: str
    student: str
    teacher: str
    chunks: int
    changed: int
    """Behind contents that the sides read differently."""
    rewritten: int
    """Behind white space or accents that one side rewrites."""


def parts_of(text: str, stripped: bool) -> list[str]:
    parts = [text[start : start + PART] for start in range(0, 6 * PART, PART)]
    return [part.strip() or "…" for part in parts] if stripped else parts


def conversation(text: str, assistant: Callable[[int, str], Message], stripped: bool = True) -> Conversation:
    parts = parts_of(text, stripped)
    return Conversation(
        [assistant(k, part) if k % 2 else {"role": "user", "content": part} for k, part in enumerate(parts)]
    )


def says(k: int, text: str) -> Message:
    return {"role": "assistant", "content": text}


def thinks(k: int, text: str) -> Message:
    half = len(text) // 2
    return says(k, f"<think>\n{text[:half].strip()}\n</think>\n\n{text[half:].strip()}")


def thinks_last(k: int, text: str) -> Message:
    return thinks(k, text) if k == 5 else says(k, text)


def reasons(k: int, text: str) -> Message:
    half = len(text) // 2
    return says(k, text[half:].strip()) | {"reasoning_content": text[:half].strip()}


def calling(text: str) -> Conversation:
    first, said, second, answer, third, last = parts_of(text, stripped=True)
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": said[:40]}}}
    return Conversation(
        [
            {"role": "user", "content": first},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": answer, "name": "search"},
            says(0, second),
            {"role": "user", "content": third},
            says(0, last),
        ]
    )


KINDS: dict[str, Callable[[str], Document]] = {
    "text": lambda text: text,
    "text, decomposed": lambda text: unicodedata.normalize("NFD", text),
    "chat, stripped": lambda text: conversation(text, says),
    "chat, cut words": lambda text: conversation(text, says, stripped=False),
    "chat, thinking in the last turn": lambda text: conversation(text, thinks_last),
    "chat, thinking in all turns": lambda text: conversation(text, thinks),
    "chat, reasoning_content in all turns": lambda text: conversation(text, reasons),
    "chat, calls": calling,
}


def counted(sample: Sample) -> tuple[int, int, int]:
    chunks = sample.teachers[0].chunks
    assert chunks is not None
    usable, changed = chunks.histories
    return usable, changed, usable - len({*chunks.compared[0].tolist()} - {-1})


def measure(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, texts: list[str]) -> list[Row]:
    """Of one pair; kinds that one of the templates refuses are left out."""
    aligner = TokenAligner(student, teacher)
    text_maker = TextSampleMaker(
        Encoder.of(student, UNLIMITED, True), (CrossTokenizer(Encoder.of(teacher, UNLIMITED, True), aligner, "bytes"),)
    )
    makers: dict[str, Callable[[Document], Sample]] = {"text": text_maker}
    if student.chat_template and teacher.chat_template:
        cross = CrossTokenizer(ChatEncoder.of(teacher, UNLIMITED, {}), aligner, "bytes")
        makers["chat"] = ChatSampleMaker(ChatEncoder.of(student, UNLIMITED, {}), (cross,))
    rows = []
    for kind, made in KINDS.items():
        make = makers.get(kind.partition(",")[0])
        if make is None:
            continue
        try:
            counts = [counted(make(made(text))) for text in texts]
        except AlignmentError:
            continue
        usable, changed, left_out = map(sum, zip(*counts, strict=True))
        names = Path(student.name_or_path).name, Path(teacher.name_or_path).name
        rows.append(Row(kind, *names, usable, changed, left_out - changed))
    return rows


def report(rows: list[Row], facts: dict[str, str]) -> str:
    lines = ["# Chunks behind contents that the two sides read differently", ""]
    lines += ["| data | student ← teacher | chunks | left out, `text` | left out, `bytes` |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: list(KINDS).index(row.kind)):
        shares = [row.changed / row.chunks, (row.changed + row.rewritten) / row.chunks]
        shown = " | ".join(f"{share:.1%}" for share in shares)
        lines.append(f"| {row.kind} | {row.student} ← {row.teacher} | {row.chunks:,} | {shown} |")
    return "\n".join([*lines, "", NOTES, *(f"* {name}: {value}" for name, value in facts.items()), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizers", type=Path, default=os.environ.get("NEMO_OPD_TOKENIZERS"))
    corpus = os.environ.get("NEMO_OPD_CORPUS")
    parser.add_argument("--corpus", type=Path, default=corpus and Path(corpus) / "multidomain.jsonl")
    arguments = parser.parse_args()
    if arguments.tokenizers is None or arguments.corpus is None:
        parser.error("give --tokenizers and --corpus, or set NEMO_OPD_TOKENIZERS and NEMO_OPD_CORPUS")
    folders = sorted(folder for folder in arguments.tokenizers.iterdir() if (folder / "tokenizer.json").is_file())
    tokenizers = [load_tokenizer(str(folder), key="--tokenizers") for folder in folders]
    lines = arguments.corpus.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    rows = [row for pair in permutations(tokenizers, 2) for row in measure(*pair, texts)]
    facts = {"hardware": hardware(), "commit": commit(), "date": date.today().isoformat(), "command": COMMAND}
    results = ROOT / "benchmarks" / "results"
    (results / "history.md").write_text(report(rows, facts), encoding="utf-8")
    written = {"facts": facts, "rows": [asdict(row) for row in rows]}
    (results / "history.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
