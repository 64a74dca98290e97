"""Logits of which the likeliest tokens alone are known, as bytes of a row each (methods.md §9.1)."""

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
    """int64 [R, k]: the likeliest tokens, likeliest first; a number that is no token where fewer are known."""
    log_p: Tensor
    """fp32 [R, k]; −inf for no token."""
    log_p_next: Tensor
    """fp32 [R]: of the next token; 0 after the last of a segment, NaN if a server has not answered at this position."""
    log_rest: Tensor
    """fp32 [R]: log of the mass of all tokens but these and the next one; −inf where there are no others."""
    entropy: Tensor
    """fp32 [R]: of the whole distribution, in nats."""


@dataclass(frozen=True, slots=True)
class SparseLayout:
    """Places of numbers in a row of bytes."""

    top_k: int
    vocab_size: int
    """W"""
    value_bytes: int
    """4: a log-probability in fp32. 3: without its lowest 8 bits, rounded: the relative error is 2⁻¹⁶ at most."""
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
        """Bytes of a row with the id of the next token, as it is handed over."""
        return self.row_bytes + self.id_bytes

    def encode(self, log_p: Tensor, following: Tensor) -> Tensor:
        """Encode log-probabilities fp32 [R, W] as uint8 [R, row_bytes].

        following: int64 [R], the next tokens; −1 after the last of a segment.
        """
        likeliest = log_p.topk(self.top_k, dim=1)
        target = following.clamp(min=0).unsqueeze(1)
        has_next = (following >= 0).unsqueeze(1)
        log_p_next = log_p.gather(1, target).where(has_next, log_p.new_zeros(()))
        others = log_p.scatter(1, likeliest.indices, -torch.inf)
        others.scatter_(1, target, others.gather(1, target).masked_fill(has_next, -torch.inf))
        numbers = log_p_next.squeeze(1), others.logsumexp(1), torch.special.entr(log_p.exp()).sum(1)
        return self.pack(SparseRows(likeliest.indices, likeliest.values, *numbers))

    def pack(self, known: SparseRows) -> Tensor:
        """Encode what is known of rows as uint8 [R, row_bytes]; `decode` is the inverse."""
        numbers = torch.stack([known.log_p_next, known.log_rest, known.entropy], 1)
        parts = [
            _low_bytes(known.ids.int(), self.id_bytes),
            _rounded(known.log_p) if self.value_bytes == 3 else _low_bytes(known.log_p, 4),
            _low_bytes(numbers, 4),
        ]
        return torch.cat(parts, 1)

    def decode(self, rows: Tensor) -> SparseRows:
        """Decode uint8 [R, ≥ row_bytes]."""
        of_ids, of_values = self.top_k * self.id_bytes, self.top_k * self.value_bytes
        ids, values, numbers = rows[:, : self.row_bytes].split([of_ids, of_values, 4 * _NUMBERS], 1)
        log_p_next, log_rest, entropy = _as_words(numbers, 4).view(torch.float32).unbind(1)
        words = _as_words(values, self.value_bytes)
        log_p = (words << 8 if self.value_bytes == 3 else words).view(torch.float32)
        return SparseRows(_as_words(ids, self.id_bytes).long(), log_p, log_p_next, log_rest, entropy)

    def next_ids(self, rows: Tensor) -> Tensor:
        """Return the next tokens, from rows as they are handed over: int64 [R], the vocabulary's size or more
        for none.
        """
        return _as_words(rows[:, self.row_bytes :], self.id_bytes).long().squeeze(1)


class SparseLogits(LogitRows):
    """Log-probabilities [B, T, W] of the tokens that rows of bytes name, −inf of all others.

    Unless the rows name all tokens, there is one column more, log of the mass of the others.
    """

    dtype = torch.float32

    def __init__(self, rows: Tensor, layout: SparseLayout, places: Tensor, size: int | None = None) -> None:
        """Keep the rows. rows: uint8 [N, handed_bytes] of packed sequences; places: int64 [B, T], from `places_in_row`.

        size: leading columns that are looked at; by default all.
        """
        self.rows, self.layout, self._places = rows, layout, places
        self.top_k = layout.top_k if layout.top_k < layout.vocab_size else None
        self._size = layout.vocab_size if size is None else size
        self.shape = (places.shape[0], places.shape[1], self._size + self.is_truncated)
        self.device = rows.device

    def cut(self, width: int) -> SparseLogits:
        return SparseLogits(self.rows, self.layout, self._places, min(width, self._size))

    def read(self, rows: Tensor, width: int) -> Tensor:
        own = self._own(rows)
        known, size = self.layout.decode(own), self._size
        # What is no column falls into the last, which is overwritten.
        read = known.log_p.new_full((len(rows), size + 1), -torch.inf)
        read.scatter_(1, known.ids.clamp(max=size), known.log_p)
        read.scatter_(1, self.layout.next_ids(own).clamp(max=size).unsqueeze(1), known.log_p_next.unsqueeze(1))
        read[:, size] = known.log_rest
        return read[:, :width]

    def known(self, rows: Tensor) -> SparseRows:
        """Return what is known of rows [R] of the flattened [B·T]."""
        return self.layout.decode(self._own(rows))

    @property
    def is_answered(self) -> Tensor:
        """Whether the teacher's answer has the log-probability of each token, given those before it: bool [B, T]."""
        log_p_next = self.layout.decode(self.rows).log_p_next[self._places]
        return torch.nn.functional.pad(~log_p_next[:, :-1].isnan(), (1, 0), value=True)

    def next_beyond_likeliest(self, rows: Tensor) -> Tensor:
        """Return the column of the next token of rows [R] if it is not among the k likeliest, else the last column.

        The result is int64 [R].
        """
        stored = self._own(rows)
        following = self.layout.next_ids(stored)
        is_likeliest = (self.layout.decode(stored).ids == following.unsqueeze(1)).any(1)
        return following.clamp(max=self._size).masked_fill(is_likeliest, self._size)

    def _own(self, rows: Tensor) -> Tensor:
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
    # Without −1, which reshape refuses where there is no row.
    grouped = stored.reshape(len(stored), stored.shape[1] // num_bytes, num_bytes)
    return torch.nn.functional.pad(grouped, (0, 4 - num_bytes)).view(torch.int32).squeeze(2)
