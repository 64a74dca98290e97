"""Final hidden states for every batch, and the head once: W / E times less than logits (METHODS §9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_opd.handoff.base import Handle, Receiver, Sender
from nemo_opd.losses.logit_rows import Head, HeadLogits


@dataclass(frozen=True, slots=True)
class HiddenStatesHandle:
    """To the final hidden states [B, T, E] of a batch, and to the head that makes logits of them."""

    hidden: Handle
    weight: Handle
    """[W, E]"""
    bias: Handle | None
    scale: float
    soft_cap: float | None

    def rows(self, receiver: Receiver, texts: slice, width: int) -> HeadLogits:
        """Of some texts, up to `width` positions: logits that are made when a loss reads them."""
        bias = None if self.bias is None else receiver.tensor(self.bias)
        head = Head(receiver.tensor(self.weight), bias, self.scale, self.soft_cap)
        return HeadLogits(receiver.tensor(self.hidden)[texts, :width], head)


class HiddenStatesWriter:
    """Collects the hidden states of a batch, microbatch by microbatch, in a buffer; the head has buffers of its own."""

    def __init__(self, new_sender: Callable[[], Sender], vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        """Rows of the head beyond the vocabulary are left out; dtype: of the buffer, and of the head."""
        self._hidden, self._weight, self._bias = new_sender(), new_sender(), new_sender()
        self._vocab_size, self._hidden_size, self._dtype = vocab_size, hidden_size, dtype
        self._head: tuple[Handle, Handle | None, float, float | None] | None = None

    def begin(self, num_texts: int, width: int) -> None:
        self._hidden_BTE = self._hidden.tensor((num_texts, width, self._hidden_size), self._dtype)

    def write(self, start: int, made: HeadLogits) -> None:
        """Put a microbatch's hidden states at row `start`; positions beyond its own width stay as they are."""
        if self._head is None:
            self._hand_over(made.head)
        rows, width, _ = made.hidden.shape
        self._hidden_BTE[start : start + rows, :width].copy_(made.hidden)

    def handle(self) -> HiddenStatesHandle:
        assert self._head is not None
        return HiddenStatesHandle(self._hidden.handle(), *self._head)

    def close(self) -> None:
        """Release the buffers; may be called again."""
        for sender in (self._hidden, self._weight, self._bias):
            sender.close()
        self._head = None

    def _hand_over(self, head: Head) -> None:
        bias = None if head.bias is None else self._copied(head.bias, self._bias)
        self._head = (self._copied(head.weight, self._weight), bias, head.scale, head.soft_cap)

    def _copied(self, parameter: Tensor, sender: Sender) -> Handle:
        own = parameter.detach()[: self._vocab_size]
        sender.tensor(own.shape, self._dtype).copy_(own)
        return sender.handle()
