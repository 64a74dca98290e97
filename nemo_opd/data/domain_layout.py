"""Layout with a column of domains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from nemo_opd.data.documents import DOMAIN
from nemo_opd.data.layout import Layout, is_string, type_name, type_of
from nemo_opd.errors import DataError

if TYPE_CHECKING:
    import datasets

    from nemo_opd.data.origin import Origin


@dataclass(frozen=True, slots=True)
class DomainLayout:
    """Another layout's documents, plus a column with their domains."""

    documents: Layout
    key: str

    @property
    def columns(self) -> Mapping[str, str]:
        return {self.key: DOMAIN, **self.documents.columns}

    def require_columns(self, schema: pa.Schema, source: str) -> None:
        self.documents.require_columns(schema, source)
        dtype = type_of(schema, self.key, "data.domain_key", source)
        if not is_string(dtype) and not pa.types.is_integer(dtype):
            raise DataError(
                f"{source}: column {self.key!r} is of type {type_name(dtype)}; set data.domain_key to a column of names"
            )

    def require_content(self, documents: datasets.Dataset, source: str, origin: Origin) -> None:
        self.documents.require_content(documents, source, origin)
