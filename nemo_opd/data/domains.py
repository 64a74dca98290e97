"""Domains of validation texts: the values of a column."""

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
    """`_MOST_DOMAINS` at most, and `others` where there are more."""
    numbers: Tensor
    """int64: domain of each document."""

    @staticmethod
    def of(values: Sequence[object]) -> Domains:
        """Name the domains of documents; one without a value is in the domain `without`."""
        given = [_WITHOUT if value is None else str(value) for value in values]
        ranked = [name for name, _ in Counter(sorted(given)).most_common()]
        names = ranked[:_MOST_DOMAINS] + [_OTHERS] * (len(ranked) > _MOST_DOMAINS)
        number = {name: min(i, _MOST_DOMAINS) for i, name in enumerate(ranked)}
        return Domains(tuple(names), torch.tensor([number[name] for name in given]))


def domains_of(documents: datasets.Dataset, column: str | None, rows: Sequence[int] | None = None) -> Domains | None:
    """Return the domains of documents, or of some of their rows; None without a column."""
    if column is None:
        return None
    values = documents.select_columns([column])[:][column]
    return Domains.of(values if rows is None else [values[row] for row in rows])


def in_domains(batch: Batch, domains: Domains | None, start: int) -> Batch:
    """Return a batch of consecutive documents, from `start` on, with their domains."""
    if domains is None:
        return batch
    return replace(batch, domain=domains.numbers[start : start + len(batch)])
