"""Bits per byte: the one measure of language modelling that tokenizers share."""

import math

from torch import Tensor

from nemo_opd.losses.cross_entropy import cross_entropy
from nemo_opd.losses.logit_rows import LogitRows
from nemo_opd.types import Mean, TokenRows


def bits_per_byte(logits_BSV: Tensor | LogitRows, tokens: TokenRows, *, vocab_size: int) -> Mean:
    """Negative log-likelihood in bits of the scored tokens that carry text, over the bytes they carry.

    logits [B, S, V] are unshifted; tokens without bytes (special tokens) are left out, so that tokenizers with
    different special tokens compare.
    """
    counted = tokens.loss_mask & (tokens.num_bytes > 0)
    ce = cross_entropy(logits_BSV, tokens.ids, mask=counted, vocab_size=vocab_size).metrics["ce"]
    assert isinstance(ce, Mean)
    return Mean(ce.total / math.log(2), (tokens.num_bytes * counted)[:, 1:].sum())
