"""What a loader reads: texts by their indices."""

from collections.abc import Mapping
from typing import Protocol

TEXT = "text"
"""The column of the texts."""


class Documents(Protocol):
    """What `sources.load_documents` returns, or anything that is read alike."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: list[int], /) -> Mapping[str, list[str]]: ...
