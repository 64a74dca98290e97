"""Layout with prompts, answers and responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from nemo_opd.data.documents import ANSWER, RESPONSE
from nemo_opd.data.layout import Layout, is_string, type_name, type_of
from nemo_opd.data.origin import Origin
from nemo_opd.errors import DataError

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """Another layout's prompts, plus a verifiable reward's answers and the responses, if their columns are named."""

    documents: Layout
    answer_key: str | None = None
    """None if no reward reads an answer."""
    response_key: str | None = None
    reward: str = "reward"
    """Section of the settings that contains `answer_key`."""

    @property
    def columns(self) -> Mapping[str, str]:
        """The user's name of a column → ours. Raises DataError if one column has two uses."""
        columns = dict(self.documents.columns)
        for setting, name, ours in self._extra_columns:
            if name in columns:
                raise DataError(
                    f"{setting}={name}: that column already holds the prompts' {columns[name]}; name another"
                )
            columns[name] = ours
        return columns

    @property
    def _extra_columns(self) -> list[tuple[str, str, str]]:
        """Setting, user's name and our name of each column beyond the prompts."""
        named = (
            (f"{self.reward}.answer_key", self.answer_key, ANSWER),
            ("data.response_key", self.response_key, RESPONSE),
        )
        return [(setting, name, ours) for setting, name, ours in named if name is not None]

    def require_columns(self, schema: pa.Schema, source: str) -> None:
        self.documents.require_columns(schema, source)
        for setting, name, ours in self._extra_columns:
            dtype = type_of(schema, name, setting, source)
            if not (is_string(dtype) or (ours == ANSWER and _is_answer(dtype))):
                kinds = "strings, numbers or lists of strings" if ours == ANSWER else "strings"
                raise DataError(
                    f"{source}: column {name!r} is of type {type_name(dtype)}; set {setting} to a column of {kinds}"
                )

    def require_content(self, documents: datasets.Dataset, source: str, origin: Origin) -> None:
        self.documents.require_content(documents, source, origin)


def _is_answer(dtype: pa.DataType) -> bool:
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype):
        return is_string(dtype.value_type)
    return pa.types.is_integer(dtype) or pa.types.is_floating(dtype)
