"""Arrow types of JSON columns. Strings stay strings, even if they look like dates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

_AS_JSON = pa.json_()
_LARGE = 2**63
"""Smallest integer that is too large for int64."""
_TYPES: Mapping[frozenset[str], pa.DataType] = {
    frozenset(): pa.null(),
    frozenset({"string"}): pa.string(),
    frozenset({"bool"}): pa.bool_(),
    frozenset({"integer"}): pa.int64(),
    frozenset({"float"}): pa.float64(),
    frozenset({"integer", "float"}): pa.float64(),
    frozenset({"strings"}): pa.list_(pa.string()),
}
"""Column types keyed by the kinds of their values; other mixtures are kept as JSON."""
_NUMBERS = {"integer", "large integer", "float"}


def column_types(
    rows: Iterable[Mapping[str, Any]], *, strings_among_others: pa.DataType = _AS_JSON
) -> dict[str, pa.DataType]:
    """Return the type of each column that a row has, in order of first occurrence.

    Numbers become strings if some are too large for int64. Objects, lists with values other than strings, and columns
    with several kinds of values become `pa.json_()`. strings_among_others: type of a column with strings and other
    values.
    """
    kinds: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.items():
            column = kinds.setdefault(name, set())
            if value is not None:
                column.add(_kind(value))
    return {name: _type(column, strings_among_others) for name, column in kinds.items()}


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "integer" if -_LARGE <= value < _LARGE else "large integer"
    if isinstance(value, float):
        return "float"
    is_texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return "strings" if is_texts else "json"


def _type(kinds: set[str], strings_among_others: pa.DataType) -> pa.DataType:
    if "large integer" in kinds and kinds <= _NUMBERS:
        return pa.string()
    return _TYPES.get(frozenset(kinds), strings_among_others if "string" in kinds else _AS_JSON)
