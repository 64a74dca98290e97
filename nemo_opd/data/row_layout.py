"""Layout with complete rows, for rewards that read any column."""

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
    """Another layout's documents, plus all other columns of their rows."""

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
    """Return the columns to read, as the user's name → ours.

    A RowLayout adds each column that all schemas have with the same type.
    """
    layout_columns = layout.columns
    if not isinstance(layout, RowLayout):
        return layout_columns
    first, *other_schemas = schemas
    extra = [
        field
        for field in first
        if field.name not in layout_columns
        and first.names.count(field.name) == 1
        and _is_known(field)
        and all(field.name in schema.names and schema.field(field.name).type == field.type for schema in other_schemas)
    ]
    return {**layout_columns, **{field.name: ROW + field.name for field in extra}}


def _is_known(field: pa.Field) -> bool:
    """Return whether `datasets` has a type for a column."""
    import datasets

    try:
        datasets.Features.from_arrow_schema(pa.schema([field]))
    except Exception:  # `datasets` raises various errors for unknown types
        return False
    return True
