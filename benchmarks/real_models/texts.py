"""Texts of the real-model benchmark by domain, split by the hash of the document's name."""

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from itertools import groupby
from pathlib import Path
from typing import Any

from nemo_opd.demo.python_sources import source_files
from nemo_opd.files import write_atomically

VALIDATION_SHARE = 8
"""One document of this number is for validation."""
LANGUAGES = ("es", "ja", "ru", "zh-cn")
"""Domains of a given corpus that are read, as one domain."""
_DOCUMENT_CHARS = 4_000
_SHORTEST_CHARS = 400
_SALT = "real models/"


@dataclass(frozen=True)
class Document:
    domain: str
    name: str
    """Unique in its domain; a document with the same name is in the same split on every machine."""
    text: str

    @property
    def rank(self) -> str:
        """Hash of the name, for an order and a split that do not depend on what else there is."""
        return hashlib.sha256(f"{_SALT}{self.domain}/{self.name}".encode()).hexdigest()

    @property
    def is_validation(self) -> bool:
        return int(self.rank[-8:], 16) % VALIDATION_SHARE == 0


def documents(corpus: Path | None) -> list[Document]:
    """Return all documents by domain and hash of their names. corpus: JSONL with `domain` and `text`."""
    found = [*_code(), *_reference(), *_readmes(), *(_languages(corpus) if corpus else ())]
    long = [document for document in found if len(document.text) >= _SHORTEST_CHARS]
    return sorted(long, key=lambda document: (document.domain, document.rank))


def training_texts(found: Sequence[Document], num_bytes: int) -> list[Document]:
    """Return documents of each domain, about `num_bytes` of it, cut to a few thousand characters."""
    chosen = []
    for _, domain in groupby(found, lambda document: document.domain):
        total = 0
        for document in domain:
            if document.is_validation or total >= num_bytes:
                continue
            text = document.text[:_DOCUMENT_CHARS]
            total += len(text.encode())
            chosen.append(Document(document.domain, document.name, text))
    return chosen


def validation_texts(
    found: Sequence[Document], number: int, tokenizers: Sequence[Any], max_tokens: int
) -> list[Document]:
    """Return the beginnings of `number` documents of each domain.

    A beginning has at most `max_tokens` tokens of each tokenizer, so every model reads the same bytes, all of them.
    """
    chosen = []
    for _, domain in groupby(found, lambda document: document.domain):
        held_out = [document for document in domain if document.is_validation][:number]
        for document in held_out:
            text = fitting(document.text[:_DOCUMENT_CHARS], tokenizers, max_tokens)
            chosen.append(Document(document.domain, document.name, text))
    return chosen


def fitting(text: str, tokenizers: Sequence[Any], max_tokens: int) -> str:
    """Return the longest beginning, to about ten characters, with at most `max_tokens` tokens of each tokenizer."""
    shortest, longest = 0, len(text)
    while longest - shortest > 10:
        middle = (shortest + longest) // 2
        fits = all(
            len(tokenizer(text[:middle], add_special_tokens=False)["input_ids"]) <= max_tokens
            for tokenizer in tokenizers
        )
        shortest, longest = (middle, longest) if fits else (shortest, middle)
    return text[:shortest]


def write(path: Path, rows: Sequence[Document]) -> None:
    lines = [json.dumps(asdict(row), ensure_ascii=False) for row in rows]
    write_atomically(path, ("\n".join(lines) + "\n").encode())


def _code() -> Iterator[Document]:
    """Yield modules of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for source in source_files(root):
        yield Document("code", source.path, (root / source.path).read_text(encoding="utf-8", errors="replace"))


def _reference() -> Iterator[Document]:
    """Yield topics of Python's language reference, as `help` shows them."""
    from pydoc_data.topics import topics

    for name, text in topics.items():
        yield Document("reference", name, text)


def _readmes() -> Iterator[Document]:
    """Yield the descriptions of installed packages."""
    for distribution in distributions():
        metadata = distribution.metadata
        text = metadata["Description"] or str(metadata.get_payload() or "")
        yield Document("readme", metadata["Name"].lower(), text)


def _languages(corpus: Path) -> Iterator[Document]:
    for i, line in enumerate(corpus.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        if row["domain"] in LANGUAGES:
            # Parts of a document would be in both splits if each were hashed: the name is that of the whole.
            for begin in range(0, len(row["text"]), _DOCUMENT_CHARS):
                yield Document("languages", f"{row['domain']} {i}", row["text"][begin : begin + _DOCUMENT_CHARS])
