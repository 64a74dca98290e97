"""The result of a transplant as JSON, as a table and as the model card."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import ModelCardData
from rich.table import Table

from nemo_opd.alignment.roles import RolePair
from nemo_opd.files import write_atomically
from nemo_opd.logging.card import CARD, hub_name
from nemo_opd.logging.formats import share
from nemo_opd.logging.page import render
from nemo_opd.models.own_card import read_own_card
from nemo_opd.transplant.row_map import Weighting

_REPORT = "transplant.json"
_MOST_NAMES = 5
_TAGS = ["nemo-opd", "tokenizer-transfer"]


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Numbers of rows in the new matrices by their source."""

    exact: int
    """Tokens with the bytes of an old token, whose row they get."""
    by_role: int
    """Special tokens with the role of an old one, whose row they get."""
    summed: int
    """Tokens spelled by several old tokens, or duplicates of an exact match."""
    unreached: int
    """Tokens that old tokens cannot spell."""
    unused: int
    """Ids without a token, and padding."""

    @property
    def tokens(self) -> int:
        return self.exact + self.by_role + self.summed + self.unreached

    @property
    def total(self) -> int:
        return self.tokens + self.unused


@dataclass(frozen=True, slots=True)
class UnreachedToken:
    id: int
    token: str


@dataclass(frozen=True, slots=True)
class BitsPerByte:
    """Bits per byte of the model before and after, on the same bytes."""

    before: float
    after: float
    num_bytes: int
    bytes_per_token_before: float
    bytes_per_token_after: float


@dataclass(frozen=True, slots=True)
class Transplanted:
    """Report of a transplant."""

    output: str
    model: str
    tokenizer: str
    old_vocab_size: int
    """Rows of the old matrices."""
    rows: RowCounts
    weighting: Weighting
    random: Literal["all", "unmatched"] | None
    """The rows that were drawn at random."""
    seed: int
    is_tied: bool
    special: tuple[RolePair, ...]
    """Special tokens of the new tokenizer (`student`) and the old ones of their role (`teacher`)."""
    unreached: tuple[UnreachedToken, ...]
    left_out: tuple[str, ...]
    """Tensors that the model does not read, and generation config keys, that were not copied to the new folder."""
    bits_per_byte: BitsPerByte | None
    """None without texts."""

    def save(self, folder: Path) -> None:
        """Write transplant.json and the model's card."""
        write_atomically(folder / _REPORT, (json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n").encode())
        card = render("transplanted.md", metadata=self._metadata().to_yaml(), result=self, lines=list(self.lines()))
        write_atomically(folder / CARD, card)

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """Yield the table's rows: description, number and share of tokens."""
        rows = self.rows
        drawn = {"all": "drawn at random", "unmatched": "drawn at random where not exact or by role"}
        sources = {
            "exact": ("of the same bytes, copied", rows.exact),
            "by role": ("special, of the same role, copied", rows.by_role),
            "summed": (f"spelled by several, weights: {self.weighting}", rows.summed),
            "unreached": ("reached by no old token, the mean of all", rows.unreached),
        }
        for name, (meaning, count) in sources.items():
            yield f"{name}: {meaning}", f"{count:,}", share(count / max(1, rows.tokens))
        if rows.unused:
            yield "no token: ids without one, and padding", f"{rows.unused:,}", ""
        if self.random is not None:
            yield f"all values {drawn[self.random]}, seed {self.seed}", "", ""

    def table(self) -> Table:
        """Return the report as a table for a terminal."""
        table = Table(title=f"{self.old_vocab_size:,} → {self.rows.total:,} rows", title_justify="left")
        table.add_column("tokens of the new tokenizer")
        table.add_column("number", justify="right")
        table.add_column("share", justify="right")
        for line in self.lines():
            table.add_row(*line)
        if (measured := self.bits_per_byte) is not None:
            table.add_section()
            table.add_row("bits per byte before", f"{measured.before:.4f}", "")
            table.add_row("bits per byte after", f"{measured.after:.4f}", "")
            table.add_row("bytes per token before", f"{measured.bytes_per_token_before:.2f}", "")
            table.add_row("bytes per token after", f"{measured.bytes_per_token_after:.2f}", "")
        return table

    def notes(self) -> Iterator[str]:
        """Yield a line for unpaired special tokens, unreached tokens and omitted tensors or keys."""
        if unpaired := [pair.student for pair in self.special if pair.teacher is None]:
            yield f"special tokens without an old one of their role (see --roles): {_summary(unpaired)}"
        if unreached := [token.token for token in self.unreached if token.token not in unpaired]:
            yield f"tokens that no old token reaches: {_summary(unreached)}"
        if self.left_out:
            yield f"left out, as the model does not read it or it names old tokens: {_summary(self.left_out)}"

    def _metadata(self) -> ModelCardData:
        return ModelCardData(
            base_model=hub_name(self.model),
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=_TAGS,
            **read_own_card(self.model).fields(),
        )


def _summary(names: Sequence[str]) -> str:
    """Return the number of names, and the first few."""
    more = ", …" if len(names) > _MOST_NAMES else ""
    return f"{len(names):,} ({', '.join(names[:_MOST_NAMES])}{more})"
