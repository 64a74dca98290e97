"""Tables of validation figures by domain, by class of token and by kind of aligned chunk."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nemo_opd.logging.facts import Records
from nemo_opd.logging.formats import change, figure, share

_KEY = re.compile(
    r"val/(?P<table>domain|class|chunk/[^/]+)/(?P<group>.+)/(?P<measure>share|ce|(?:bits_per_byte|kd)(?:/[^/]+)?)"
)
_TITLES = {"domain": "by domain", "class": "by class of token", "chunk": "by aligned chunk, student : {}"}
NOTHING = "-"
_Figures = Mapping[str, float]
"""Values by measure."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of texts; all columns except the first hold numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def group_tables(records: Records) -> list[TextTable]:
    """Return a table for each kind of group that was validated."""
    validated = [tables for record in records if (tables := figures_by_table(record))]
    if not validated:
        return []
    first, last = validated[0], validated[-1]
    names = sorted(last, key=lambda name: list(_TITLES).index(name.partition("/")[0]))
    return [_table(name, first.get(name, {}), last[name]) for name in names]


def figures_by_table(record: Mapping[str, float]) -> dict[str, dict[str, dict[str, float]]]:
    """Return figures by table, group and measure."""
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for key, value in record.items():
        if match := _KEY.fullmatch(key):
            groups = tables.setdefault(match["table"], {})
            groups.setdefault(match["group"], {})[match["measure"]] = value
    return tables


def _table(name: str, first: Mapping[str, _Figures], last: Mapping[str, _Figures]) -> TextTable:
    teachers = _suffixes(first.values(), "bits_per_byte/")
    distilled = _suffixes(last.values(), "kd/")
    heads = ["", "share of tokens", "bits per byte before", "after", *(f"teacher {name}" for name in teachers)]
    heads += ["cross-entropy after", *(f"KD of {name}" for name in distilled)]
    rows = []
    for group in sorted(last, key=lambda group: -last[group].get("share", 0)):
        start, end = first.get(group, {}), last[group]
        student = start.get("bits_per_byte")
        bits = [_bits(start, "bits_per_byte", None), _bits(end, "bits_per_byte", student)]
        bits += [_bits(start, f"bits_per_byte/{teacher}", student) for teacher in teachers]
        losses = [_number(end, "ce"), *(_number(end, f"kd/{teacher}") for teacher in distilled)]
        rows.append([group.replace("_", " "), share(end.get("share", 0)), *bits, *losses])
    return TextTable(title_of(name), heads, rows)


def title_of(table: str) -> str:
    """Return the heading of a table."""
    kind, _, teacher = table.partition("/")
    return f"Validation {_TITLES[kind].format(teacher)}"


def _suffixes(groups: Iterable[_Figures], prefix: str) -> list[str]:
    """Return the parts of measures after a prefix, in order."""
    return list(dict.fromkeys(key.removeprefix(prefix) for group in groups for key in group if key.startswith(prefix)))


def _number(figures: _Figures, measure: str) -> str:
    return figure(figures[measure]) if measure in figures else NOTHING


def _bits(figures: _Figures, measure: str, start: float | None) -> str:
    """Format bits per byte, with the change from the student's initial value."""
    value = figures.get(measure)
    if value is None:
        return NOTHING
    return f"{value:.4f}" + (f" ({change(value / start - 1)})" if start else "")


def markdown(table: TextTable) -> str:
    """Return a table in Markdown."""
    lines = [table.heads, ["---", *["---:"] * (len(table.heads) - 1)], *table.rows]
    body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"## {table.title}\n\n{body}\n"
