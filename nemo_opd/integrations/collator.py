"""A collator from rows of a dataset to a batch of all models' tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_opd.data.collate import collate
from nemo_opd.data.documents import TEXT, Document, read_documents
from nemo_opd.data.samples import SampleMaker
from nemo_opd.errors import DataError


@dataclass(frozen=True)
class _Rows:
    rows: Sequence[Mapping[str, Any]]
    columns: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, indices: list[int]) -> dict[str, list[Any]]:
        try:
            columns = {ours: [self.rows[i][theirs] for i in indices] for theirs, ours in self.columns.items()}
        except KeyError as error:
            raise DataError(
                f"a row has no column {error}, but {', '.join(map(repr, self.rows[0])) or 'none'}; name it as "
                "data.text_key or data.messages_key, and keep the dataset as it is: texts are tokenized here, for all "
                "models (with TRL: dataset_kwargs={'skip_prepare_dataset': True})"
            ) from error
        for ours, theirs in self.columns.items():
            _require_utf8(columns[ours], theirs)
        for text in columns.get(TEXT, ()):
            if not isinstance(text, str):
                raise DataError(f"a row's text is {text!r} ({type(text).__name__}); correct it, or leave the row out")
        return columns


def _require_utf8(values: Sequence[Any], column: str) -> None:
    """Raise DataError if a value, or a text nested in it, contains half of a surrogate pair."""
    for value in values:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            passage = text[max(0, error.start - 40) : error.end]
            raise DataError(
                f"a row's {column} has half of a surrogate pair (\\ud800 to \\udfff), which is not a character, at the "
                f"end of {passage!r}; correct it, or leave the row out"
            ) from error


@dataclass(frozen=True)
class Collator:
    """Collator from rows, a list of dicts, to the student's `input_ids` and a `batch`, a `nemo_opd.types.Batch`.

    It is picklable, for the processes of a DataLoader. Raises DataError without rows, or if a row has no text or half
    of a surrogate pair.
    """

    make_sample: SampleMaker
    columns: Mapping[str, str]
    """Our names of columns, keyed by the dataset's names."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not rows:
            raise DataError("a batch needs at least one row")
        batch = collate([self.make_sample(document) for document in self.documents(rows)])
        return {"input_ids": batch.student.ids, "batch": batch}

    def documents(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[Document]:
        """Return the documents of rows. Raises DataError if a row has no text or half of a surrogate pair."""
        return read_documents(_Rows(rows, self.columns), list(range(len(rows))))
