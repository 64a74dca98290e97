"""An audit, special-token roles and sample rows for a terminal, and sample rows as a heat map."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from nemo_opd.alignment.pieces import BYTE_FALLBACK, Pieces, pieces_of
from nemo_opd.alignment.roles import RolePair
from nemo_opd.errors import ProjectionError, StorageError
from nemo_opd.files import write_atomically
from nemo_opd.projection.build import CJK, Audit, Coverage, is_partial_utf8
from nemo_opd.projection.matrix import ProjectionMatrix

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase

KINDS = ("numerals", "white space", "special", "CJK", "partial UTF-8", "several pieces")
_FONT = "DejaVu Sans Mono"
"""Font that comes with matplotlib. It has no CJK; characters it lacks are written as escapes."""
_MAX_LABEL = 20
"""Characters of a token's label; longer ones are shortened in the middle."""
_CELL_WIDTH = 0.27
"""Width of a cell in inches."""


@dataclass(frozen=True, slots=True)
class _Entry:
    id: int
    token: str
    """Token as written by `shown_token`."""
    weight: float


@dataclass(frozen=True, slots=True)
class _Sample:
    kind: str
    id: int
    token: str
    """Token as written by `shown_token`."""
    exact: bool
    entries: tuple[_Entry, ...]


def samples(
    matrix: ProjectionMatrix,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    count: int = 6,
) -> list[_Sample]:
    """Choose up to `count` rows of every kind, half of them exact if possible, ordered by kind and id.

    Raises ProjectionError for a negative count.
    """
    if count < 0:
        raise ProjectionError(f"{count} sample rows of each kind are not possible; give 0 or more")
    student, teacher = pieces_of(student_tokenizer), pieces_of(teacher_tokenizer)

    def sample(kind: str, token_id: int) -> _Sample:
        entries = entries_of(matrix, token_id, teacher_tokenizer, teacher)
        token = shown_token(student_tokenizer, student, token_id)
        return _Sample(kind, token_id, token, bool(matrix.exact[token_id]), entries)

    return [sample(kind, i) for kind, ids in _sample_ids(matrix, student, count).items() for i in ids]


def entries_of(
    matrix: ProjectionMatrix, token_id: int, teacher_tokenizer: PreTrainedTokenizerBase, teacher: Pieces
) -> tuple[_Entry, ...]:
    """Return the entries of a student token's row."""
    row = zip(matrix.indices[token_id].tolist(), matrix.weights[token_id].tolist(), strict=True)
    return tuple(_Entry(t, shown_token(teacher_tokenizer, teacher, t), weight) for t, weight in row if t >= 0)


def _sample_ids(matrix: ProjectionMatrix, pieces: Pieces, count: int) -> Mapping[str, Sequence[int]]:
    """Choose up to `count` student ids per kind, spread over the vocabulary; prefer special tokens with a row."""
    kinds: dict[str, list[int]] = {kind: [] for kind in KINDS}
    lengths = matrix.row_lengths
    for token_id, piece in enumerate(pieces.as_list()):
        if pieces.origin[token_id] == BYTE_FALLBACK and piece.isascii():
            continue  # twins of ordinary tokens, which would look like rows that lack their partner
        if kind := _kind(piece, bool(pieces.is_special[token_id]), bool(lengths[token_id] > 1)):
            kinds[kind].append(token_id)
    kinds["special"] = [i for i in kinds["special"] if lengths[i]] or kinds["special"]
    return {kind: _exact_and_other(matrix, ids, count) for kind, ids in kinds.items()}


def _kind(piece: bytes, is_special: bool, is_split: bool) -> str | None:
    if is_special:
        return "special"
    if piece.isdigit():
        return "numerals"
    if piece.isspace():
        return "white space"
    if is_partial_utf8(piece):
        return "partial UTF-8"
    if CJK.search(piece.decode()):
        return "CJK"
    return "several pieces" if is_split else None


def _exact_and_other(matrix: ProjectionMatrix, ids: Sequence[int], count: int) -> Sequence[int]:
    """Choose half exact and half other ids; fill up with one kind if the other kind has too few."""
    exact = [i for i in ids if matrix.exact[i]]
    inexact = [i for i in ids if not matrix.exact[i]]
    num_exact = min(len(exact), max(count // 2, count - len(inexact)))
    return sorted([*_spread(exact, num_exact), *_spread(inexact, count - num_exact)])


def _spread(ids: Sequence[int], count: int) -> Sequence[int]:
    places = np.linspace(0, len(ids) - 1, min(count, len(ids))).round().astype(int)
    return [ids[place] for place in places]


def counted_runs(token: str) -> str:
    """Write a token of `shown_token` with spaces as ␣, and more than three equal white-space signs as ␣×26 or \\n×5."""
    return re.sub(r"(␣|\\[ntr])\1{3,}", lambda run: f"{run[1]}×{len(run[0]) // len(run[1])}", token.replace(" ", "␣"))


def shown_token(tokenizer: PreTrainedTokenizerBase, pieces: Pieces, token_id: int) -> str:
    """Write a token in quotes, bytes that are not characters as \\x.., special tokens by name."""
    if pieces.is_special[token_id]:
        return str(tokenizer.convert_ids_to_tokens(token_id))
    piece = pieces.bytes_of(token_id)
    return repr(piece) if is_partial_utf8(piece) else repr(piece.decode())


def audit_lines(audit: Audit) -> tuple[str, str]:
    """Write the audit in two lines of at most 76 characters, for the start of a run."""
    shared = (
        f"overlap {audit.overlap:.3f}",
        f"1:1 {audit.one_to_one:.3f}",
        f"specials {_format_coverage(audit.special)}",
    )
    numerals = (f"{length}-digit {_format_coverage(digits)}" for length, digits in enumerate(audit.digits, start=1))
    return ", ".join(shared), "exact pairs of numerals: " + ", ".join(numerals)


def _format_coverage(coverage: Coverage) -> str:
    return f"{coverage.exact:,}/{coverage.total:,}" if coverage.total else "none on either side"


def short_name(name: str) -> str:
    """Return a hub name or demo reference unchanged, and the last part of a path."""
    path = Path(name)
    return path.name if path.is_absolute() or name.startswith(".") else name


def audit_table(audit: Audit) -> Table:
    """Tabulate all figures with their meanings."""
    title = f"{short_name(audit.student_name)} → {short_name(audit.teacher_name)}"
    table = Table(title=Text(title, style="italic"), title_justify="left", show_header=True, header_style="bold")
    table.add_column("projection")
    table.add_column("value", justify="right")
    table.add_column("meaning", overflow="fold")
    table.add_row("vocabularies", f"{audit.student_vocab_size:,} → {audit.teacher_vocab_size:,}", "largest id + 1")
    table.add_row("overlap", f"{audit.overlap:.3f}", "shared tokens / smaller vocabulary")
    table.add_row("one to one", f"{audit.one_to_one:.3f}", "student tokens with an exact partner")
    for length, rows in enumerate(audit.rows_by_pieces):
        meaning = f"… with {length} teacher tokens" if length > 1 else "… with one teacher token"
        table.add_row(f"rows of {length}", f"{rows:,}", meaning if length else "student tokens without a row")
    for name, coverage in _coverages(audit).items():
        meaning = f"{coverage.exact:,} of {coverage.total:,} exact, {coverage.spelled:,} with a row"
        table.add_row(name, f"{coverage.rate:.3f}" if coverage.total else "–", meaning)
    return table


def _coverages(audit: Audit) -> Mapping[str, Coverage]:
    """Return the coverages, keyed by readable names."""
    numerals = {f"{n}-digit numerals": coverage for n, coverage in enumerate(audit.digits, start=1)}
    return numerals | {
        "white space": audit.whitespace,
        "CJK": audit.cjk,
        "partial UTF-8": audit.partial_utf8,
        "special tokens": audit.special,
    }


def roles_table(pairs: Iterable[RolePair]) -> Table:
    """Tabulate the roles of the student's special tokens, and the teacher's tokens with the same role."""
    table = Table(title="special tokens by role", title_justify="left", header_style="bold")
    for column in ("role", "student", "teacher", "exact"):
        table.add_column(column, overflow="fold")
    for pair in pairs:
        texts = (pair.role, pair.student, "–" if pair.teacher is None else pair.teacher)
        table.add_row(*map(Text, texts), "✓" if pair.one_to_one else "")
    return table


def sample_table(samples: Iterable[_Sample]) -> Table:
    """Tabulate rows of numerals, white space, special tokens, CJK, partial UTF-8 and tokens of several pieces."""
    table = Table(title="sample rows", title_justify="left", header_style="bold")
    for column in ("kind", "student token", "exact", "teacher tokens and weights"):
        table.add_column(column, overflow="fold")
    previous_kind = ""
    for sample in samples:
        if previous_kind and sample.kind != previous_kind:
            table.add_section()
        entries = "   ".join(f"{_visible(entry.token)} {entry.weight:.3g}" for entry in sample.entries)
        kind = "" if sample.kind == previous_kind else sample.kind
        table.add_row(kind, Text(_visible(sample.token)), "✓" if sample.exact else "", Text(entries or "–"))
        previous_kind = sample.kind
    return table


def _visible(token: str) -> str:
    """Write a token unchanged if it has a visible character, otherwise with its spaces counted."""
    return token if token.strip("'\" ") else counted_runs(token)


def plot_samples(samples: Sequence[_Sample], path: str | PathLike[str], title: str = "") -> None:
    """Write a PNG: one row per sample, one column per teacher token, weights as colours and numbers; ● marks exact
    rows.

    Raises ProjectionError if it cannot be written. The file is complete or absent.
    """
    image = io.BytesIO()
    heat_map(samples, title).savefig(image, dpi=150, format="png", bbox_inches="tight", pad_inches=0.15)
    try:
        write_atomically(Path(path), image.getvalue())
    except StorageError as error:
        cause = error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) else cause
        raise ProjectionError(f"cannot write the heat map to {path}: {reason}") from error


def heat_map(samples: Sequence[_Sample], title: str = "") -> Figure:
    """Draw the figure of `plot_samples`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys(entry.id for sample in samples for entry in sample.entries))
    labels = {entry.id: entry.token for sample in samples for entry in sample.entries}
    weights = _weights(samples, columns)
    size = (3.4 + _CELL_WIDTH * max(8, len(columns)), 2.6 + _CELL_WIDTH * max(4, len(samples)))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    mesh = axes.imshow(np.ma.masked_equal(weights, 0), cmap="Blues", vmin=-0.15, vmax=1.05, aspect="equal")
    _label_axes(axes, samples, [labels[column] for column in columns])
    _write_weights(axes, weights)
    _separate_kinds(axes, samples, len(columns))
    axes.set_title(title or f"{len(samples)} sample rows", loc="left", fontsize=10, pad=12, parse_math=False)
    bar = figure.colorbar(mesh, ax=axes, shrink=min(1.0, 9 / size[1]), aspect=30, pad=0.01, label="weight")
    bar.ax.set_ylim(0, 1)
    return figure


def _weights(samples: Sequence[_Sample], columns: Sequence[int]) -> NDArray[np.float64]:
    place = {column: i for i, column in enumerate(columns)}
    weights = np.zeros((max(1, len(samples)), max(1, len(columns))))
    for row, sample in enumerate(samples):
        for entry in sample.entries:
            weights[row, place[entry.id]] = entry.weight
    return weights


def _label_axes(axes: Axes, samples: Sequence[_Sample], columns: Sequence[str]) -> None:
    rows = [f"{label(sample.token)} {'●' if sample.exact else ' '}" for sample in samples]
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(range(len(columns)), [label(column) for column in columns], rotation=90)
    for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        text.set(fontfamily=_FONT, fontsize=7.5, parse_math=False)
    axes.set_xlabel("teacher tokens")
    axes.set_ylabel("student tokens  (● exact)")
    axes.set_xticks(np.arange(0.5, max(1, len(columns))), minor=True)
    axes.set_yticks(np.arange(0.5, max(1, len(rows))), minor=True)
    axes.grid(which="minor", color="0.92", linewidth=0.5)
    axes.tick_params(which="both", length=0)
    for spine in axes.spines.values():
        spine.set_edgecolor("0.8")


def _write_weights(axes: Axes, weights: NDArray[np.float64]) -> None:
    for row, column in np.argwhere(weights > 0).tolist():
        weight = weights[row, column]
        text = "1" if weight >= 0.9995 else f"{weight:.2g}".removeprefix("0")
        colour = "white" if weight > 0.55 else "0.25"
        axes.text(column, row, text, ha="center", va="center", fontsize=5.5, color=colour)


def _separate_kinds(axes: Axes, samples: Sequence[_Sample], num_columns: int) -> None:
    """Draw a line between kinds, and each kind's name at the right edge."""
    start = 0
    for kind, group in groupby(samples, key=lambda sample: sample.kind):
        end = start + len(list(group))
        if start:
            axes.axhline(start - 0.5, color="0.45", linewidth=0.8)
        place = (max(1, num_columns) - 0.6, start - 0.35)
        axes.text(*place, kind, ha="right", va="top", fontsize=8, color="0.45", style="italic")
        start = end


def label(token: str) -> str:
    """Write a token of `shown_token` in the font's characters: white-space runs are counted, others escaped."""
    if token[:1] in "'\"":
        token = token[1:-1]
    shown = (c if _has_glyph(c) else c.encode("unicode_escape").decode() for c in counted_runs(token))
    text = "".join(shown)
    return text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL // 2]}…{text[-(_MAX_LABEL // 2 - 1) :]}"


@cache
def _has_glyph(character: str) -> bool:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties(family=_FONT)))
    return character.isprintable() and font.get_char_index(ord(character)) > 0
