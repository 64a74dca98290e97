"""Domains of validation texts: values of a column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_opd.types import Batch

if TYPE_CHECKING:
    import datasets

_MOST_DOMAINS = 20
_OTHERS, _WITHOUT = "others", "without"


@dataclass(frozen=True, slots=True)
class Domains:
    """Domains of documents, the most frequent first."""

    names: tuple[str, ...]
    """The `_MOST_DOMAINS` most frequent at most, then `others` if there are more."""
    numbers: Tensor
    """int64: index in `names` for each document."""

    @staticmethod
    def of(values: Sequence[object]) -> Domains:
        """Number the domains of documents; documents without a value are in the domain `without`."""
        labels = [_WITHOUT if value is None else str(value) for value in values]
        ranked = [name for name, _ in Counter(sorted(labels)).most_common()]
        names = ranked[:_MOST_DOMAINS] + [_OTHERS] * (len(ranked) > _MOST_DOMAINS)
        number = {name: min(i, _MOST_DOMAINS) for i, name in enumerate(ranked)}
        return Domains(tuple(names), torch.tensor([number[name] for name in labels]))


def domains_of(documents: datasets.Dataset, column: str | None, rows: Sequence[int] | None = None) -> Domains | None:
    """Return the domains of documents, or of some of their rows; None if `column` is None."""
    if column is None:
        return None
    values = documents.select_columns([column])[:][column]
    return Domains.of(values if rows is None else [values[row] for row in rows])


def in_domains(batch: Batch, domains: Domains | None, start: int) -> Batch:
    """Add their domains to a batch of consecutive documents that begins at document `start`."""
    if domains is None:
        return batch
    return replace(batch, domain=domains.numbers[start : start + len(batch)])
