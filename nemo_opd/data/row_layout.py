"""Whole rows, for rewards that read any column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from nemo_opd.config.reward import FunctionReward, RewardBase
from nemo_opd.data.documents import ROW
from nemo_opd.data.layout import Layout
from nemo_opd.data.origin import Origin

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Documents of another layout, with all other columns of their rows."""

    documents: Layout

    @property
    def columns(self) -> Mapping[str, str]:
        return self.documents.columns

    def require_columns(self, schema: pa.Schema, source: str) -> None:
        self.documents.require_columns(schema, source)

    def require_content(self, documents: datasets.Dataset, source: str, origin: Origin) -> None:
        self.documents.require_content(documents, source, origin)


def reads_rows(reward: RewardBase | None) -> bool:
    """Return whether a reward may read any column of a row."""
    return reward is not None and any(isinstance(part, FunctionReward) for part in reward.parts)


def columns_in(layout: Layout, schemas: Sequence[pa.Schema]) -> Mapping[str, str]:
    """Return the user's names of the columns that are read → ours: of whole rows, those that all schemas have alike."""
    own = layout.columns
    if not isinstance(layout, RowLayout):
        return own
    first, *others = schemas
    rest = [
        field
        for field in first
        if field.name not in own
        and first.names.count(field.name) == 1
        and _is_known(field)
        and all(field.name in other.names and other.field(field.name).type == field.type for other in others)
    ]
    return {**own, **{field.name: ROW + field.name for field in rest}}


def _is_known(field: pa.Field) -> bool:
    """Return whether `datasets` has a type for a column."""
    import datasets

    try:
        datasets.Features.from_arrow_schema(pa.schema([field]))
    except Exception:  # any error about types that it does not know
        return False
    return True
