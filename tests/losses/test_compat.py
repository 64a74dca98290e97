"""Presets against the formulas of the systems they are named after, in plain loops."""

import math
from functools import partial

import pytest
import torch

from nemo_opd.errors import ConfigError
from nemo_opd.losses import alm, byte_prefix, gold, h_kl, p_kl, shared_prefix, strict, uld

from . import oracle, oracle_chunks
from .cases import STUDENT, TEACHER, Batch, pair, two_tokenizers

TAU = 1.7
KINDS = [kind for kind in oracle.KINDS if kind[0] != "tvd"]


def arguments(batch: Batch) -> dict:
    names = ("student_ids", "teacher_ids", "student_chunk_id", "teacher_chunk_id")
    return {name: getattr(batch, name) for name in names}


def units(batch: Batch) -> list[tuple[list, list, list, list]]:
    """Of each unit the softmaxes of all its positions on both sides, at TAU, and its tokens."""
    sides = (batch.student_chunk_id.tolist(), batch.teacher_chunk_id.tolist())
    found = []
    for (b, i, j), (m, n) in zip(oracle.units(*sides), oracle_chunks.lengths(*sides), strict=True):
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


PAIRS = {gold: oracle_chunks.exact_pairs(pair()), h_kl: oracle_chunks.relaxed_pairs(pair())}


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
    out = loss(batch.student, batch.teacher, projection=pair(), **arguments(batch), normalizer=1, **options)
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
    out = loss(batch.student, batch.teacher, projection=pair(), **arguments(batch), normalizer=1, **options)
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
    out = p_kl(batch.student, batch.teacher, projection=pair(), **arguments(batch), normalizer=1, **options)
    assert out.loss.item() == pytest.approx(total, rel=1e-12)


def test_uld_of_trl():
    batch = two_tokenizers()
    total = math.fsum(tails(observed(p, x), observed(q, y), {}, 99, cut=False) for p, q, x, y in units(batch))
    out = uld(batch.student, batch.teacher, **arguments(batch), normalizer=1, compat="trl", temperature=TAU)
    assert out.loss.item() == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize(
    "run",
    [
        partial(gold, projection=pair(), compat="trl"),
        partial(h_kl, projection=pair(), compat="nemo_rl", divergence="jsd"),
        partial(gold, projection=pair(), merge="observed"),
        partial(p_kl, projection=pair(), compat="nemo_rl", vocab_topk=4),
        partial(uld, compat="trl"),
        partial(shared_prefix, projection=pair(), continuation_weight=0.7),
        partial(strict, projection=pair(), continuation_weight=0.7),
    ],
)
def test_gradients(run):
    batch = two_tokenizers(scale=1.0)
    student = batch.student.requires_grad_()

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return run(logits, batch.teacher, **arguments(batch), chunk_size=3).loss

    assert torch.autograd.gradcheck(loss, student, rtol=1e-6, atol=1e-7, fast_mode=True)


def test_observed_without_a_preset_is_compared_raw_with_weights_of_one():
    """A rest cell of it would hold two different events."""
    batch, pairs = two_tokenizers(), PAIRS[gold]
    total = 0.0
    for p, q, x, y in units(batch):
        s, t = observed(p, x), observed(q, y)
        total += oracle.kl([t[k] for k in pairs.values()], [s[k] for k in pairs]) + tails(s, t, pairs, 99, cut=False)
    options = {"merge": "observed", "temperature": TAU, "normalizer": 1}
    out = gold(batch.student, batch.teacher, projection=pair(), **arguments(batch), **options)
    assert out.loss.item() == pytest.approx(TAU**2 * total, rel=1e-12)


@pytest.mark.parametrize("loss", [p_kl, gold, h_kl, strict, byte_prefix, shared_prefix])
def test_the_continuation_is_the_alm_term_of_chunks_of_several_tokens(loss):
    batch = two_tokenizers()
    run = partial(
        loss, batch.student, batch.teacher, projection=pair(), **arguments(batch), temperature=TAU, normalizer=1
    )
    chunk_id = batch.student_chunk_id.clone()
    sides = (batch.student_chunk_id.tolist(), batch.teacher_chunk_id.tolist())
    for (b, i, _), size in zip(oracle.units(*sides), oracle_chunks.lengths(*sides), strict=True):
        if size == (1, 1):
            chunk_id[b, i + 1] = -1
    longer = {**arguments(batch), "student_chunk_id": chunk_id}
    term = alm(batch.student, batch.teacher, **longer, temperature=TAU, normalizer=1)
    assert term.metrics["kd"].count == 8
    out, plain = run(continuation_weight=0.7), run()
    assert out.loss.item() == pytest.approx(plain.loss.item() + 0.7 * term.loss.item(), rel=1e-12)
    # Chunks of several tokens are no units of strict itself, and units of the whole.
    assert out.metrics["kd"].count == plain.metrics["kd"].count + (8 if loss is strict else 0)


def test_the_sizes_are_those_of_the_tests():
    """A chunk of several tokens on each side, tokens of no pair on both, and tails of different length."""
    assert len(STUDENT) - len(PAIRS[gold]) != len(TEACHER) - len(PAIRS[gold])
    assert len(PAIRS[gold]) < len(PAIRS[h_kl])


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (p_kl, {"compat": "trl"}, "compat='trl'.*choose from nemo_rl"),
        (p_kl, {"compat": "nemo_rl", "merge": "first"}, "merge=first contradicts compat=nemo_rl, which uses mean"),
        (
            p_kl,
            {"compat": "nemo_rl", "coverage_coef": 1.0},
            "coverage_coef=1.0 contradicts compat=nemo_rl, which uses 0.0",
        ),
        (p_kl, {"merge": "observed"}, "merge=observed"),
        (gold, {"compat": "verl"}, "compat='verl'.*nemo_rl, trl"),
        (gold, {"compat": "trl", "merge": "mean"}, "merge=mean contradicts compat=trl, which uses observed"),
        (strict, {"continuation_weight": -1}, "continuation_weight=-1"),
    ],
)
def test_what_does_not_fit_is_named(loss, options, message):
    batch = two_tokenizers()
    with pytest.raises(ConfigError, match=message):
        loss(batch.student, batch.teacher, projection=pair(), **arguments(batch), **options)
