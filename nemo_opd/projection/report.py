"""An audit, special-token roles and sample rows for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.table import Table
from rich.text import Text

from nemo_opd.alignment.roles import RolePair
from nemo_opd.projection.audit import Audit, Coverage
from nemo_opd.projection.samples import Sample, counted_runs


def audit_lines(audit: Audit) -> tuple[str, str]:
    """Write the audit in two lines of at most 76 characters, for the start of a run."""
    shared = (
        f"overlap {audit.overlap:.3f}",
        f"1:1 {audit.one_to_one:.3f}",
        f"specials {_format_coverage(audit.special)}",
        f"recommended loss {audit.recommended_loss}",
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
        table.add_row(f"rows of {length}", f"{rows:,}", _rows_meaning(length))
    for name, coverage in _coverages(audit).items():
        meaning = f"{coverage.exact:,} of {coverage.total:,} exact, {coverage.spelled:,} with a row"
        table.add_row(name, f"{coverage.rate:.3f}" if coverage.total else "–", meaning)
    covered = "covered" if audit.recommended_loss == "h_kl" else "not covered"
    table.add_row("recommended loss", audit.recommended_loss, f"numerals are {covered} by exact pairs")
    return table


def _rows_meaning(length: int) -> str:
    if length == 0:
        return "student tokens without a row"
    return "… with one teacher token" if length == 1 else f"… with {length} teacher tokens"


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


def sample_table(samples: Iterable[Sample]) -> Table:
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
