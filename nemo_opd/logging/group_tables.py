"""Tables of what was learned where: validation by domain, by class of token and by kind of aligned chunk."""

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
    """A table of texts; all columns but the first are numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def group_tables(records: Records) -> list[TextTable]:
    """Return a table for each kind of group that was validated; none where no record has any."""
    validated = [found for record in records if (found := figures_by_table(record))]
    if not validated:
        return []
    before, after = validated[0], validated[-1]
    tables = sorted(after, key=lambda name: list(_TITLES).index(name.partition("/")[0]))
    return [_table(name, before.get(name, {}), after[name]) for name in tables]


def figures_by_table(record: Mapping[str, float]) -> dict[str, dict[str, dict[str, float]]]:
    """Return figures by table and group."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for key, value in record.items():
        if match := _KEY.fullmatch(key):
            groups = found.setdefault(match["table"], {})
            groups.setdefault(match["group"], {})[match["measure"]] = value
    return found


def _table(name: str, before: Mapping[str, _Figures], after: Mapping[str, _Figures]) -> TextTable:
    teachers = _named(before.values(), "bits_per_byte/")
    distilled = _named(after.values(), "kd/")
    heads = ["", "share of tokens", "bits per byte before", "after", *(f"teacher {each}" for each in teachers)]
    heads += ["cross-entropy after", *(f"KD of {each}" for each in distilled)]
    rows = []
    for group in sorted(after, key=lambda group: -after[group].get("share", 0)):
        start, end = before.get(group, {}), after[group]
        own = start.get("bits_per_byte")
        bits = [_bits(start, "bits_per_byte", None), _bits(end, "bits_per_byte", own)]
        bits += [_bits(start, f"bits_per_byte/{each}", own) for each in teachers]
        losses = [_number(end, "ce"), *(_number(end, f"kd/{each}") for each in distilled)]
        rows.append([group.replace("_", " "), share(end.get("share", 0)), *bits, *losses])
    return TextTable(title_of(name), heads, rows)


def title_of(table: str) -> str:
    """Return the heading of a table."""
    kind, _, teacher = table.partition("/")
    return f"Validation {_TITLES[kind].format(teacher)}"


def _named(groups: Iterable[_Figures], prefix: str) -> list[str]:
    """Return the names that follow a prefix of measures, in order."""
    return list(dict.fromkeys(key.removeprefix(prefix) for group in groups for key in group if key.startswith(prefix)))


def _number(figures: _Figures, measure: str) -> str:
    return figure(figures[measure]) if measure in figures else NOTHING


def _bits(figures: _Figures, measure: str, start: float | None) -> str:
    """Format bits per byte, with the change from the student's at the start."""
    value = figures.get(measure)
    if value is None:
        return NOTHING
    return f"{value:.4f}" + (f" ({change(value / start - 1)})" if start else "")


def markdown(table: TextTable) -> str:
    """Return a table in Markdown."""
    lines = [table.heads, ["---", *["---:"] * (len(table.heads) - 1)], *table.rows]
    body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"## {table.title}\n\n{body}\n"
