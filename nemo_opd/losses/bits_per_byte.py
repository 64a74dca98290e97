"""Bits per byte: the one measure of language modelling that tokenizers share."""

import math

import torch.nn.functional as F
from torch import Tensor

from nemo_opd.types import Mean, TokenRows


def bits_per_byte(logits_BSV: Tensor, tokens: TokenRows, *, vocab_size: int) -> Mean:
    """Negative log-likelihood in bits of the scored tokens that carry text, over the bytes they carry.

    logits [B, S, V] are unshifted; tokens without bytes (special tokens) are left out, so that tokenizers with
    different special tokens compare.
    """
    num_bytes = (tokens.num_bytes * tokens.loss_mask)[:, 1:]
    rows, positions = num_bytes.nonzero(as_tuple=True)
    targets = tokens.ids[rows, positions + 1]
    nats = logits_BSV.new_zeros((), dtype=logits_BSV.dtype).double()
    for row in rows.unique():
        chosen = rows == row
        logits = logits_BSV[row, positions[chosen], :vocab_size].float()
        nats += F.cross_entropy(logits, targets[chosen], reduction="sum").double()
    return Mean(nats / math.log(2), num_bytes.sum())
