"""Logits of the likeliest tokens only, stored as a row of bytes per position (methods.md §9.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.logits.rows import LogitRows

_NUMBERS = 3
"""Number of fp32 values after the tokens of a row."""


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Decoded rows."""

    ids: Tensor
    """int64 [R, k]: the likeliest tokens in descending order; ids outside the vocabulary if fewer than k are known."""
    log_p: Tensor
    """fp32 [R, k]: their log-probabilities; −inf for ids outside the vocabulary."""
    log_p_next: Tensor
    """fp32 [R]: log-probability of the next token; 0 at the end of a segment, NaN if the server did not answer here."""
    log_rest: Tensor
    """fp32 [R]: log of the mass of all tokens except `ids` and the next token; −inf if those are all tokens."""
    entropy: Tensor
    """fp32 [R]: entropy of the full distribution, in nats."""


@dataclass(frozen=True, slots=True)
class SparseLayout:
    """Layout of a row of bytes."""

    top_k: int
    vocab_size: int
    """W"""
    value_bytes: int
    """4: a log-probability in fp32. 3: rounded to its highest 24 bits, with a relative error of at most 2⁻¹⁶."""
    id_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.top_k <= self.vocab_size or self.value_bytes not in (3, 4):
            raise ConfigError(
                f"top_k={self.top_k} of {self.vocab_size} tokens in {self.value_bytes} bytes: give 1 to "
                f"{self.vocab_size} tokens, and 3 or 4 bytes"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row."""
        return self.top_k * (self.id_bytes + self.value_bytes) + 4 * _NUMBERS

    @property
    def handed_bytes(self) -> int:
        """Bytes of a row in the handoff: a stored row and the id of the next token."""
        return self.row_bytes + self.id_bytes

    def encode(self, log_p: Tensor, following: Tensor) -> Tensor:
        """Encode log-probabilities fp32 [R, W] as uint8 [R, row_bytes].

        following: int64 [R], the next tokens; −1 at the end of a segment.
        """
        likeliest = log_p.topk(self.top_k, dim=1)
        target = following.clamp(min=0).unsqueeze(1)
        has_next = (following >= 0).unsqueeze(1)
        log_p_next = log_p.gather(1, target).where(has_next, log_p.new_zeros(()))
        unknown = log_p.scatter(1, likeliest.indices, -torch.inf)
        unknown.scatter_(1, target, unknown.gather(1, target).masked_fill(has_next, -torch.inf))
        numbers = log_p_next.squeeze(1), unknown.logsumexp(1), torch.special.entr(log_p.exp()).sum(1)
        return self.pack(SparseRows(likeliest.indices, likeliest.values, *numbers))

    def pack(self, decoded: SparseRows) -> Tensor:
        """Encode rows as uint8 [R, row_bytes]; the inverse of `decode`."""
        numbers = torch.stack([decoded.log_p_next, decoded.log_rest, decoded.entropy], 1)
        parts = [
            _low_bytes(decoded.ids.int(), self.id_bytes),
            _rounded(decoded.log_p) if self.value_bytes == 3 else _low_bytes(decoded.log_p, 4),
            _low_bytes(numbers, 4),
        ]
        return torch.cat(parts, 1)

    def decode(self, rows: Tensor) -> SparseRows:
        """Decode uint8 [R, ≥ row_bytes]."""
        sizes = [self.top_k * self.id_bytes, self.top_k * self.value_bytes, 4 * _NUMBERS]
        ids, values, numbers = rows[:, : self.row_bytes].split(sizes, 1)
        log_p_next, log_rest, entropy = _as_words(numbers, 4).view(torch.float32).unbind(1)
        words = _as_words(values, self.value_bytes)
        log_p = (words << 8 if self.value_bytes == 3 else words).view(torch.float32)
        return SparseRows(_as_words(ids, self.id_bytes).long(), log_p, log_p_next, log_rest, entropy)

    def next_ids(self, rows: Tensor) -> Tensor:
        """Return the next tokens of uint8 [R, handed_bytes], int64 [R]; without one, the vocabulary's size or more."""
        return _as_words(rows[:, self.row_bytes :], self.id_bytes).long().squeeze(1)


class SparseLogits(LogitRows):
    """Log-probabilities [B, T, W] of the tokens that rows of bytes contain, −inf for all other tokens.

    Unless the rows contain all tokens, an additional column has the log of the other tokens' mass.
    """

    dtype = torch.float32

    def __init__(self, rows: Tensor, layout: SparseLayout, places: Tensor, size: int | None = None) -> None:
        """Wrap encoded rows.

        rows: uint8 [N, handed_bytes] of packed sequences. places: int64 [B, T], from `places_in_row`. size: leading
        columns of the vocabulary to read; by default all.
        """
        self.rows, self.layout, self._places = rows, layout, places
        self.top_k = layout.top_k if layout.top_k < layout.vocab_size else None
        self._size = layout.vocab_size if size is None else size
        self.shape = (places.shape[0], places.shape[1], self._size + self.is_truncated)
        self.device = rows.device

    def cut(self, width: int) -> SparseLogits:
        return SparseLogits(self.rows, self.layout, self._places, min(width, self._size))

    def read(self, rows: Tensor, width: int) -> Tensor:
        encoded = self._encoded(rows)
        decoded, size = self.layout.decode(encoded), self._size
        # Ids without a column go to the last column, which is overwritten.
        log_p = decoded.log_p.new_full((len(rows), size + 1), -torch.inf)
        log_p.scatter_(1, decoded.ids.clamp(max=size), decoded.log_p)
        next_ids = self.layout.next_ids(encoded).clamp(max=size).unsqueeze(1)
        log_p.scatter_(1, next_ids, decoded.log_p_next.unsqueeze(1))
        log_p[:, size] = decoded.log_rest
        return log_p[:, :width]

    def known(self, rows: Tensor) -> SparseRows:
        """Decode rows [R] of the flattened [B·T]."""
        return self.layout.decode(self._encoded(rows))

    @property
    def is_answered(self) -> Tensor:
        """Whether the teacher's answer contains each token's log-probability, bool [B, T]; true for first tokens."""
        log_p_next = self.layout.decode(self.rows).log_p_next[self._places]
        return torch.nn.functional.pad(~log_p_next[:, :-1].isnan(), (1, 0), value=True)

    def next_beyond_likeliest(self, rows: Tensor) -> Tensor:
        """Return the column of each next token that is not among the k likeliest, int64 [R]; else the last column."""
        encoded = self._encoded(rows)
        following = self.layout.next_ids(encoded)
        is_likeliest = (self.layout.decode(encoded).ids == following.unsqueeze(1)).any(1)
        return following.clamp(max=self._size).masked_fill(is_likeliest, self._size)

    def _encoded(self, rows: Tensor) -> Tensor:
        return self.rows.index_select(0, self._places.flatten()[rows])


def _low_bytes(numbers: Tensor, num_bytes: int) -> Tensor:
    """Return the lowest bytes of 32-bit numbers [R, k]: uint8 [R, k · num_bytes]."""
    return numbers.contiguous().view(torch.uint8).view(len(numbers), -1, 4)[..., :num_bytes].flatten(1)


def _rounded(values: Tensor) -> Tensor:
    """Round fp32 [R, k] to their highest three bytes: uint8 [R, k · 3]."""
    words = values.contiguous().view(torch.int32) + 0x80
    return words.view(torch.uint8).view(len(values), -1, 4)[..., 1:].flatten(1)


def _as_words(stored: Tensor, num_bytes: int) -> Tensor:
    """Return numbers of `num_bytes` as int32: uint8 [R, k · num_bytes] → [R, k]."""
    # Not −1, which reshape rejects for 0 rows.
    grouped = stored.reshape(len(stored), stored.shape[1] // num_bytes, num_bytes)
    return torch.nn.functional.pad(grouped, (0, 4 - num_bytes)).view(torch.int32).squeeze(2)
