"""Presets against the formulas of the systems they are named after, in plain loops."""

import math
from functools import partial

import pytest
import torch

from nemo_opd.losses import gold, h_kl, p_kl, uld
from tests.reference.losses import pairs_of

from . import oracle
from .cases import TEACHER, Batch, pair, two_tokenizers
from .plain import plain_maps

TAU = 1.7
KINDS = [kind for kind in oracle.KINDS if kind[0] != "tvd"]


def units(batch: Batch) -> list[tuple[list, list, list, list]]:
    """Of each unit the softmaxes of all its positions on both sides, at TAU, and its tokens."""
    sides = (batch.student_chunk_id.tolist(), batch.teacher_chunk_id.tolist())
    found = []
    for (b, i, j), (m, n) in zip(oracle.units(*sides), oracle.lengths(*sides), strict=True):
        p = [oracle.softmax(batch.student[b, i + k].tolist(), TAU) for k in range(m)]
        q = [oracle.softmax(batch.teacher[b, j + k].tolist(), TAU) for k in range(n)]
        x, y = batch.student_ids[b, i + 1 : i + 1 + m].tolist(), batch.teacher_ids[b, j + 1 : j + 1 + n].tolist()
        found.append((p, q, x, y))
    return found


def geometric(distributions: list) -> list:
    return [
        math.exp(math.fsum(map(math.log, column)) / len(distributions)) for column in zip(*distributions, strict=True)
    ]


def arithmetic(distributions: list) -> list:
    return [math.fsum(column) / len(distributions) for column in zip(*distributions, strict=True)]


def observed(distributions: list, tokens: list) -> list:
    factor = math.prod(p[x] for p, x in zip(distributions[1:], tokens[1:], strict=True))
    return [factor * mass for mass in distributions[0]]


def tails(p: list, q: list, pairs: dict, num_ranks: int, cut: bool) -> float:
    ours = sorted((mass for s, mass in enumerate(p) if s not in pairs), reverse=True)[:num_ranks]
    theirs = sorted((mass for t, mass in enumerate(q) if t not in pairs.values()), reverse=True)[:num_ranks]
    length = min(len(ours), len(theirs)) if cut else max(len(ours), len(theirs))
    ours, theirs = ([*side, *[0.0] * length][:length] for side in (ours, theirs))
    return math.fsum(abs(a - b) for a, b in zip(ours, theirs, strict=True))


PAIRS = {
    loss: dict(zip(*pairs_of(plain_maps(pair(), TEACHER), least), strict=True))
    for loss, least in ((gold, math.inf), (h_kl, 0.6))
}


@pytest.mark.parametrize(("kind", "weights"), KINDS)
@pytest.mark.parametrize("loss", [gold, h_kl])
def test_paired_losses_of_nemo_rl(loss, kind, weights):
    batch, pairs = two_tokenizers(), PAIRS[loss]
    total = 0.0
    for p, q, _, _ in units(batch):
        s, t = geometric(p), geometric(q)
        common = oracle.divergence([t[k] for k in pairs.values()], [s[k] for k in pairs], kind, **weights)
        total += TAU**2 * (common + tails(s, t, pairs, 2, cut=True))
    options = {"compat": "nemo_rl", "uncommon_topk": 2, "temperature": TAU, "divergence": kind, **weights}
    out = loss(batch.student, batch.teacher, projection=pair(), **batch.of_chunks, normalizer=1, **options)
    assert out.loss.item() == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize(("kind", "weights"), KINDS)
@pytest.mark.parametrize("loss", [gold, h_kl])
def test_paired_losses_of_trl(loss, kind, weights):
    batch, pairs = two_tokenizers(), PAIRS[loss]
    share, total = len(pairs) / len(TEACHER), 0.0
    for p, q, x, y in units(batch):
        s, t = observed(p, x), observed(q, y)
        common = oracle.divergence([t[k] for k in pairs.values()], [s[k] for k in pairs], kind, **weights)
        total += share * common + (1 - share) * tails(s, t, pairs, 99, cut=False)
    options = {"compat": "trl", "temperature": TAU, "divergence": kind, **weights}
    out = loss(batch.student, batch.teacher, projection=pair(), **batch.of_chunks, normalizer=1, **options)
    assert out.loss.item() == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("top_k", [4, None])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_p_kl_of_nemo_rl(kind, top_k):
    """Columns chosen over all positions; the teacher normalised on them at every position, the student afterwards."""
    batch = two_tokenizers()
    rows = [
        {int(t): float(w) for t, w in zip(ts, ws, strict=True) if t >= 0}
        for ts, ws in zip(pair().indices, pair().weights, strict=True)
    ]
    covered = sorted({t for row in rows for t in row})
    largest = batch.teacher.flatten(0, 1).amax(0).tolist()
    kept = sorted(covered, key=lambda t: -largest[t])[:top_k]
    total = 0.0
    for p, q, _, _ in units(batch):
        mean = arithmetic(p)
        s = [math.fsum(mean[v] * row.get(t, 0.0) for v, row in enumerate(rows)) for t in kept]
        t_bar = geometric([[masses[t] / math.fsum(masses[k] for k in kept) for t in kept] for masses in q])
        total += TAU**2 * oracle.divergence(t_bar, [mass / math.fsum(s) for mass in s], kind)
    options = {"compat": "nemo_rl", "vocab_topk": top_k, "temperature": TAU, "divergence": kind, "chunk_size": 3}
    out = p_kl(batch.student, batch.teacher, projection=pair(), **batch.of_chunks, normalizer=1, **options)
    assert out.loss.item() == pytest.approx(total, rel=1e-12)


def test_uld_of_trl():
    batch = two_tokenizers()
    total = math.fsum(tails(observed(p, x), observed(q, y), {}, 99, cut=False) for p, q, x, y in units(batch))
    out = uld(batch.student, batch.teacher, **batch.of_chunks, normalizer=1, compat="trl", temperature=TAU)
    assert out.loss.item() == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize(
    "run",
    [
        partial(gold, projection=pair(), compat="trl"),
        partial(h_kl, projection=pair(), compat="nemo_rl", divergence="jsd"),
        partial(p_kl, projection=pair(), compat="nemo_rl", vocab_topk=4),
        partial(uld, compat="trl"),
    ],
)
def test_gradients(run):
    batch = two_tokenizers(scale=1.0)
    student = batch.student.requires_grad_()

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return run(logits, batch.teacher, **batch.of_chunks, chunk_size=3).loss

    assert torch.autograd.gradcheck(loss, student, rtol=1e-6, atol=1e-7, fast_mode=True)
