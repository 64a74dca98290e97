"""Metrics of samples beside a loss: against loops, and without an effect on the gradient."""

import math
from dataclasses import replace

import pytest
import torch

from nemo_opd.logits import Head, HeadLogits, compute_together
from nemo_opd.losses import same_vocab
from nemo_opd.losses.logit_metrics import plan_chunk_overlap, plan_overlap, plan_rollout_statistics
from nemo_opd.types import SampledRows, TokenRows
from tests.reference.losses import top

from .cases import pair, random_logits, two_tokenizers

V = 7


def batch() -> tuple[torch.Tensor, TokenRows, SampledRows]:
    """Two sampled sequences and one from a dataset; padding columns are the likeliest."""
    logits = random_logits(3, 6, V + 2, 0)
    logits[..., V:] = 30.0
    ids = torch.arange(18).view(3, 6) % V
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]]).bool()
    num_bytes = torch.tensor([[1, 2, 3, 1, 2, 0], [1, 4, 0, 0, 0, 0], [1] * 6]).int()
    engine = -random_logits(1, 3, 6, 1, 1.0)[0].abs()
    sampled = SampledRows(torch.tensor([True, True, False]), engine, engine, torch.zeros(3), torch.tensor([0, 0, 1]))
    return logits, TokenRows(ids, torch.tensor([6, 3, 6]), mask, num_bytes), sampled


def test_statistics_by_loops():
    """Bugs: sequences of the dataset counted as samples, the sign of the difference, tokens without bytes."""
    logits, tokens, sampled = batch()
    metrics = plan_rollout_statistics(logits, tokens, sampled, vocab_size=V, chunk_size=2).compute().metrics
    entropies, differences, bits, num_bytes = [], [], [], 0
    for b in range(2):
        for i in range(1, 6):
            if tokens.loss_mask[b, i]:
                powers = [math.exp(z) for z in logits[b, i - 1, :V].tolist()]
                p = [power / math.fsum(powers) for power in powers]
                log_p = math.log(p[int(tokens.ids[b, i])])
                entropies.append(-math.fsum(x * math.log(x) for x in p))
                differences.append(log_p - float(sampled.logprobs[b, i]))
                num_bytes += int(tokens.num_bytes[b, i])
                bits += [-log_p / math.log(2)] if tokens.num_bytes[b, i] else []
    count = len(entropies)
    expected = {
        "entropy": math.fsum(entropies) / count,
        "mismatch": math.fsum(map(abs, differences)) / count,
        "mismatch_max": max(map(abs, differences)),
        "mismatch_k3": math.fsum(math.exp(d) - 1 - d for d in differences) / count,
        "bits_per_byte": math.fsum(bits) / num_bytes,
    }
    assert {name: metric.value() for name, metric in metrics.items()} == pytest.approx(expected, rel=1e-11)


def test_beside_a_loss_statistics_have_no_gradient():
    """Also from hidden states, with and without a soft cap. Bug: a metric with a gradient."""
    logits, tokens, sampled = batch()
    hidden, weight = random_logits(3, 6, 4, 2, 1.0).requires_grad_(), random_logits(1, V, 4, 3, 1.0)[0].requires_grad_()
    for soft_cap in (None, 3.0):
        student = HeadLogits(hidden, Head(weight, soft_cap=soft_cap))
        loss = same_vocab.plan(student, logits[..., :V], mask=tokens.loss_mask, normalizer=3)
        statistics = plan_rollout_statistics(student, tokens, sampled, vocab_size=V)
        overlap = plan_overlap(student, logits[..., :V], mask=tokens.loss_mask)
        alone, together = loss.compute().loss, compute_together([statistics, loss, overlap])
        torch.testing.assert_close(together.loss, alone, rtol=1e-14, atol=0)
        gradients = (torch.autograd.grad(value, [hidden, weight]) for value in (alone, together.loss))
        for alone_gradient, together_gradient in zip(*gradients, strict=True):
            torch.testing.assert_close(together_gradient, alone_gradient, rtol=1e-12, atol=1e-15)
        assert set(together.metrics) == {"kd", "overlap", "entropy", "bits_per_byte"} | {
            f"mismatch{kind}" for kind in ("", "_max", "_k3")
        }


def test_nothing_sampled():
    """Bug: a division by zero."""
    logits, tokens, sampled = batch()
    none = replace(sampled, is_sampled=torch.zeros(3, dtype=torch.bool))
    out = plan_rollout_statistics(logits.requires_grad_(), tokens, none, vocab_size=V).compute()
    assert not torch.autograd.grad(out.loss, logits)[0].any()
    assert all(metric.value() == 0 for metric in out.metrics.values())


@pytest.mark.parametrize("k", [1, 3, 99])
def test_overlap_of_one_vocabulary(k):
    """Bugs: unshifted logits, masked tokens counted, a divisor of k beyond the vocabulary."""
    student, teacher = random_logits(2, 5, V, 4), random_logits(2, 5, V, 5)
    mask = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 1, 1, 0]])
    shares = [
        len({*top(student[b, i - 1], k)} & {*top(teacher[b, i - 1], k)}) / min(k, V)
        for b in range(2)
        for i in range(1, 5)
        if mask[b, i]
    ]
    overlap = plan_overlap(student, teacher, mask=mask, top_k=k, chunk_size=2).compute().metrics["overlap"]
    assert (overlap.value(), overlap.count) == (pytest.approx(sum(shares) / len(shares)), 5)


def test_overlap_across_tokenizers_is_by_exact_pairs():
    """Bug: relaxed pairs counted, or equal ids compared."""
    batch = two_tokenizers(3)
    partner = {int(s): int(t) for s, t in pair().shared_pairs}
    places = []
    for b, chunks in enumerate(batch.student_chunk_id.tolist()):
        for chunk in sorted(set(chunks) - {-1}):
            places.append((b, chunks.index(chunk) - 1, batch.teacher_chunk_id[b].tolist().index(chunk) - 1))
    shares = []
    for b, i, j in places:
        mapped = {partner.get(token) for token in top(batch.student[b, i], 4)}
        shares.append(len(mapped & {*top(batch.teacher[b, j], 4)}) / 4)
    arguments = batch.chunk_arguments | {"projection": batch.projection}
    overlap = plan_chunk_overlap(batch.student, batch.teacher, **arguments, top_k=4).compute().metrics["overlap"]
    assert sum(shares) > 0
    assert (overlap.value(), overlap.count) == (pytest.approx(sum(shares) / len(shares)), len(shares))
