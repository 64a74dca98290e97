"""An audit and sample rows as rich tables, and a plot of a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np
from rich.markup import escape
from rich.table import Table

from nemo_opd.alignment.pieces import Pieces
from nemo_opd.projection.audit import CJK, Audit, Coverage, is_partial_utf8
from nemo_opd.projection.matrix import ProjectionMatrix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def audit_table(audit: Audit) -> Table:
    title = f"{audit.student_name} → {audit.teacher_name}"
    table = Table(title=escape(title), title_justify="left", show_header=True, header_style="bold")
    table.add_column("projection")
    table.add_column("value", justify="right")
    table.add_column("meaning", overflow="fold")
    table.add_row("vocabularies", f"{audit.student_vocab_size:,} → {audit.teacher_vocab_size:,}", "largest id + 1")
    table.add_row("overlap", f"{audit.overlap:.3f}", "shared tokens / smaller vocabulary")
    table.add_row("one to one", f"{audit.one_to_one:.3f}", "student tokens with an exact partner")
    for pieces, rows in enumerate(audit.rows_by_pieces):
        meaning = "student tokens without a row" if pieces == 0 else "student tokens with so many teacher tokens"
        table.add_row(f"rows of {pieces}", f"{rows:,}", meaning)
    for name, coverage in coverages(audit).items():
        meaning = f"{coverage.exact:,} of {coverage.total:,} exact, {coverage.spelled:,} with a row"
        table.add_row(name, f"{coverage.rate:.3f}" if coverage.total else "–", meaning)
    covered = "covered" if audit.recommended_loss == "h_kl" else "not covered"
    table.add_row("recommended loss", audit.recommended_loss, f"numerals are {covered} by exact pairs")
    return table


def coverages(audit: Audit) -> Mapping[str, Coverage]:
    """By the name a person reads."""
    numerals = {f"{n}-digit numerals": coverage for n, coverage in enumerate(audit.digits, start=1)}
    return numerals | {
        "white space": audit.whitespace,
        "CJK": audit.cjk,
        "partial UTF-8": audit.partial_utf8,
        "special tokens": audit.special,
    }


def sample_ids(matrix: ProjectionMatrix, pieces: Pieces, count: int) -> Mapping[str, Sequence[int]]:
    """Up to `count` student ids of each kind, spread evenly over the vocabulary; special ones with a row if any."""
    kinds: dict[str, list[int]] = {"numerals": [], "white space": [], "special": [], "CJK": [], "partial UTF-8": []}
    for token_id, piece in enumerate(pieces.as_list()):
        for kind in _kinds(piece, bool(pieces.is_special[token_id])):
            kinds[kind].append(token_id)
    kinds["special"] = [i for i in kinds["special"] if matrix.indices[i, 0] >= 0] or kinds["special"]
    return {kind: _spread(ids, count) for kind, ids in kinds.items()}


def _kinds(piece: bytes, is_special: bool) -> Iterator[str]:
    if is_special:
        yield "special"
    elif piece.isdigit():
        yield "numerals"
    elif piece.isspace():
        yield "white space"
    elif is_partial_utf8(piece):
        yield "partial UTF-8"
    elif CJK.search(piece.decode()):
        yield "CJK"


def _spread(ids: Sequence[int], count: int) -> Sequence[int]:
    places = np.linspace(0, len(ids) - 1, min(count, len(ids))).round().astype(int)
    return [ids[place] for place in places]


def sample_table(
    matrix: ProjectionMatrix,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    student: Pieces,
    teacher: Pieces,
    count: int = 6,
) -> Table:
    """Rows of numerals, white space, special tokens, CJK and partial UTF-8."""
    table = Table(title="sample rows", title_justify="left", header_style="bold")
    for column in ("kind", "student token", "exact", "teacher tokens and weights"):
        table.add_column(column, overflow="fold")
    for kind, ids in sample_ids(matrix, student, count).items():
        for token_id in ids:
            entries = zip(matrix.indices[token_id].tolist(), matrix.weights[token_id].tolist(), strict=True)
            shown = [f"{shown_token(teacher_tokenizer, teacher, t)} {weight:.3g}" for t, weight in entries if t >= 0]
            table.add_row(
                kind,
                escape(shown_token(student_tokenizer, student, token_id)),
                "✓" if matrix.exact[token_id] else "",
                escape("   ".join(shown)) or "–",
            )
    return table


def shown_token(tokenizer: PreTrainedTokenizerBase, pieces: Pieces, token_id: int) -> str:
    """A token in quotes, bytes that are no characters as \\x.., special tokens by name."""
    if pieces.is_special[token_id]:
        return str(tokenizer.convert_ids_to_tokens(token_id))
    piece = pieces.bytes_of(token_id)
    return repr(piece) if is_partial_utf8(piece) else repr(piece.decode())


def plot_sample(matrix: ProjectionMatrix, path: str | PathLike[str], rows: int = 200, columns: int = 200) -> None:
    """A PNG heat map of weights: `rows` student ids spread over the vocabulary × teacher ids in `columns` bins."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ids = np.unique(np.linspace(0, matrix.student_vocab_size - 1, rows).round().astype(int))
    image = np.zeros((len(ids), columns))
    row, entry = np.nonzero(matrix.indices[ids] >= 0)
    bins = matrix.indices[ids][row, entry].astype(np.int64) * columns // matrix.teacher_vocab_size
    np.maximum.at(image, (row, bins), matrix.weights[ids][row, entry])
    figure = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    extent = (0, matrix.teacher_vocab_size, matrix.student_vocab_size, 0)
    mesh = axes.imshow(image, aspect="auto", cmap="magma", vmin=0, vmax=1, interpolation="nearest", extent=extent)
    axes.set(xlabel="teacher id", ylabel="student id", title=f"{len(ids)} of {matrix.student_vocab_size:,} rows")
    figure.colorbar(mesh, ax=axes, label="largest weight")
    figure.savefig(path, dpi=120, format="png")
