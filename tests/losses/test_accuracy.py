import math

import pytest
import torch

from nemo_opd.errors import ConfigError
from nemo_opd.logging.metrics import merge
from nemo_opd.losses.logit_metrics import AccuracyRecorder, calibration_error
from nemo_opd.types import Mean, TokenRows

B, S, V = 3, 9, 13
VOCAB_SIZE = 11
"""Columns of the tokenizer; the head has two more."""


def batch(mask_share: float = 0.7) -> tuple[torch.Tensor, TokenRows]:
    """Make logits whose largest token column is the next token half of the time, and two larger padding columns."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(B, S, V, generator=generator, dtype=torch.float64)
    ids = torch.randint(VOCAB_SIZE, (B, S), generator=generator)
    pushed = torch.rand(B, S - 1, generator=generator) < 0.5
    logits[:, :-1].scatter_add_(2, ids[:, 1:, None], 10.0 * pushed[..., None].double())
    logits[..., VOCAB_SIZE:] = 100
    mask = torch.rand(B, S, generator=generator) < mask_share
    return logits, TokenRows(ids, torch.full((B,), S), mask, torch.ones(B, S, dtype=torch.int32))


def accuracy(
    logits: torch.Tensor, tokens: TokenRows, vocab_size: int = VOCAB_SIZE, chunk_size: int | None = None
) -> Mean:
    plan = AccuracyRecorder.of(logits, tokens, vocab_size=vocab_size, chunk_size=chunk_size).plan
    metric = plan.compute().metrics["accuracy"]
    assert isinstance(metric, Mean)
    return metric


def counted(logits: torch.Tensor, tokens: TokenRows) -> tuple[int, int]:
    """Hits and scored tokens by plain loops."""
    hits = scored = 0
    for b in range(B):
        for i in range(1, S):
            if tokens.loss_mask[b, i]:
                row = logits[b, i - 1].tolist()[:VOCAB_SIZE]
                scored += 1
                hits += row.index(max(row)) == int(tokens.ids[b, i])
    return hits, scored


@pytest.mark.parametrize("chunk_size", [None, 1, 4])
def test_equals_the_loop(chunk_size: int | None) -> None:
    """Bugs: unshifted logits, a head that is not cut, token 0 counted, a chunk compared with the wrong targets."""
    logits, tokens = batch()
    hits, scored = counted(logits, tokens)
    assert 0 < hits < scored < B * (S - 1)
    result = accuracy(logits, tokens, chunk_size=chunk_size)
    assert (float(result.total), result.count) == (hits, scored)


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_calibration_equals_plain_loops(chunk_size: int | None) -> None:
    """Two batches. Bugs: errors of bins added with their signs, means of batches averaged, padding columns in the
    probability.
    """
    gaps, scored, metrics = [0.0] * 15, 0, []
    for share in (0.7, 0.4):
        logits, tokens = batch(share)
        plan = AccuracyRecorder.of(logits, tokens, vocab_size=VOCAB_SIZE, chunk_size=chunk_size).plan
        metrics.append(plan.compute().metrics)
        for b in range(B):
            for i in range(1, S):
                if tokens.loss_mask[b, i]:
                    row = logits[b, i - 1].tolist()[:VOCAB_SIZE]
                    confidence = math.exp(max(row)) / math.fsum(map(math.exp, row))
                    hit = row.index(max(row)) == int(tokens.ids[b, i])
                    gaps[math.ceil(confidence * 15) - 1] += confidence - hit
                    scored += 1
    assert calibration_error(merge(metrics)) == pytest.approx(sum(map(abs, gaps)) / scored, rel=1e-9)


def test_nothing_scored_is_zero_of_zero() -> None:
    """Bug: a division by zero."""
    logits, tokens = batch(mask_share=0.0)
    result = accuracy(logits, tokens)
    assert (float(result.total), result.count, result.value()) == (0, 0, 0)


def test_needs_no_gradient() -> None:
    """Bug: it fails on logits in training, or keeps their graph."""
    logits, tokens = batch()
    assert not accuracy(logits.requires_grad_(), tokens).total.requires_grad


def test_a_head_narrower_than_the_tokenizer_is_refused() -> None:
    """Bug: ids beyond the head are counted as misses."""
    logits, tokens = batch()
    with pytest.raises(ConfigError, match="vocab_size=14"):
        accuracy(logits, tokens, vocab_size=V + 1)
