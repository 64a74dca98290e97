"""Scores of sequences against loops over Python numbers."""

import math

import pytest
import torch
from torch import Tensor

from nemo_opd.aggregation import joined_scores, mean_logprob, sequence_scores
from nemo_opd.errors import ConfigError
from nemo_opd.logits.rows import TensorLogits
from nemo_opd.types import SequenceScores, TokenRows

VOCAB_SIZE = 7


def random_rows(seed: int = 0) -> tuple[Tensor, TokenRows]:
    """Return three padded sequences, one of a single token; some tokens have no bytes and some are not scored."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(3, 6, VOCAB_SIZE + 2, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, VOCAB_SIZE, (3, 6), generator=generator)
    lengths = torch.tensor([6, 4, 1])
    mask = (torch.arange(6) < lengths[:, None]) & (torch.arange(6) > 0)
    mask[0, 3] = False
    num_bytes = torch.randint(0, 4, (3, 6), generator=generator, dtype=torch.int32)
    num_bytes[0, 2] = 0
    return logits, TokenRows(ids, lengths, mask, num_bytes)


def oracle(kind: str, row: list[float], token: int) -> float:
    powers = [math.exp(value) for value in row[:VOCAB_SIZE]]
    shares = [power / math.fsum(powers) for power in powers]
    if kind == "bits_per_byte":
        return -math.log2(shares[token])
    if kind == "entropy":
        return -math.fsum(share * math.log2(share) for share in shares)
    return -math.log2(max(shares))


def in_parts(logits: torch.Tensor, num_rows: int | None) -> TensorLogits:
    """Return logits that are read `num_rows` rows at a time."""
    rows = TensorLogits(logits)
    rows.block_bytes = None if num_rows is None else 4 * 4 * num_rows * VOCAB_SIZE
    return rows


@pytest.mark.parametrize("num_rows", [1, 2, None])
@pytest.mark.parametrize("kind", ["bits_per_byte", "entropy", "max_probability"])
def test_bits_and_bytes_by_loops(kind: str, num_rows: int | None) -> None:
    """Bugs: no shift, nats for bits, padded columns in the softmax, tokens without bytes, rows of another sequence."""
    logits, tokens = random_rows()
    rows = in_parts(logits, num_rows)
    scores = sequence_scores(rows, tokens, score=kind, vocab_size=VOCAB_SIZE)
    for b in range(3):
        counted = [i for i in range(1, 6) if tokens.loss_mask[b, i] and tokens.num_bytes[b, i] > 0]
        bits = math.fsum(oracle(kind, logits[b, i - 1].tolist(), int(tokens.ids[b, i])) for i in counted)
        assert float(scores.bits[b]) == pytest.approx(bits, rel=1e-12)
        assert int(scores.num_bytes[b]) == sum(int(tokens.num_bytes[b, i]) for i in counted)


def test_impossible_tokens_have_no_part_in_the_entropy() -> None:
    """Bug: 0 · log 0 is NaN."""
    logits, tokens = random_rows()
    logits[..., 3] = -torch.inf
    assert sequence_scores(logits, tokens, score="entropy", vocab_size=VOCAB_SIZE).bits.isfinite().all()


def test_sizes_that_do_not_fit() -> None:
    logits, tokens = random_rows()
    with pytest.raises(ConfigError, match="vocab_size=10"):
        sequence_scores(logits, tokens, score="entropy", vocab_size=10)
    with pytest.raises(ConfigError, match="ids has shape"):
        sequence_scores(logits[:, 1:], tokens, score="entropy", vocab_size=VOCAB_SIZE)


def test_ranks_are_joined_in_order_and_padding_is_dropped() -> None:
    parts = [SequenceScores(torch.tensor([1.0, 2.0]), torch.tensor([3, 4]), torch.tensor([5, 6])) for _ in range(2)]
    joined = joined_scores(parts, torch.tensor([True, False, True, True]))
    assert (joined.bits.tolist(), joined.num_bytes.tolist()) == ([1.0, 1.0, 2.0], [3, 3, 4])
    assert joined.num_tokens.tolist() == [5, 5, 6]


def test_log_probability_is_of_all_scored_tokens() -> None:
    """Bugs: a token without bytes that ends a turn is dropped; bits for nats; no tokens give a probability of 1."""
    logits, tokens = random_rows()
    scores = sequence_scores(in_parts(logits, 2), tokens, score="log_probability", vocab_size=VOCAB_SIZE)
    for b in range(2):
        scored = [i for i in range(1, 6) if tokens.loss_mask[b, i]]
        bits = [oracle("bits_per_byte", logits[b, i - 1].tolist(), int(tokens.ids[b, i])) for i in scored]
        expected = -math.log(2) * math.fsum(bits) / len(scored)
        assert float(mean_logprob(scores)[b]) == pytest.approx(expected, rel=1e-12)
    assert scores.num_tokens[2] == 0
    assert mean_logprob(scores)[2] == -math.inf
