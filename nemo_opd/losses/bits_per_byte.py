"""Bits per byte, a tokenizer-independent measure of language modelling."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.losses.cross_entropy import cross_entropy
from nemo_opd.types import Mean, Metric, TokenRows


def bits_per_byte(logits_BSV: Tensor | LogitRows, tokens: TokenRows, *, vocab_size: int) -> Mean:
    """Compute Σ −log₂ p of the scored tokens with bytes, divided by their number of bytes; no gradient.

    Logits [B, S, V] are unshifted. Tokens without bytes (special tokens) are left out, so that tokenizers with
    different special tokens are comparable.
    """
    with torch.no_grad():
        metric = plan_bits_per_byte(logits_BSV, tokens, vocab_size=vocab_size).compute().metrics["bits_per_byte"]
    assert isinstance(metric, Mean)
    return metric


def plan_bits_per_byte(logits_BSV: Tensor | LogitRows, tokens: TokenRows, *, vocab_size: int) -> PlannedLoss:
    """Plan the metric `bits_per_byte`, to be computed together with losses."""
    counted = tokens.loss_mask & (tokens.num_bytes > 0)
    num_bytes = (tokens.num_bytes * counted)[:, 1:].sum()

    def metrics_of(weighted: Tensor, unweighted: Tensor) -> dict[str, Metric]:
        return {"bits_per_byte": Mean(unweighted / math.log(2), num_bytes)}

    plan = cross_entropy.plan(logits_BSV, tokens.ids, mask=counted, vocab_size=vocab_size)
    return replace(plan, metrics_of=metrics_of)
