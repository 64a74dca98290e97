"""Estimates of the KL on sampled chunks: by plain loops, and in expectation over all that could have been sampled."""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_opd.alignment import TokenAligner
from nemo_opd.errors import ConfigError
from nemo_opd.losses import sampled_chunk_kl, sampled_kl
from tests.tokenizers_fixture import encode, real_tokenizer

from . import oracle, oracle_prefix
from .cases import Batch, identity, one_tokenizer, random_logits, two_tokenizers

WAYS = [
    ("k1", "policy_gradient"),
    ("k2", "policy_gradient"),
    ("k3", "policy_gradient"),
    ("k2", "direct"),
    ("k3", "direct"),
]
WEIGHTS = torch.tensor([0.5, 2.0], dtype=torch.float64)


def chunk_arguments(batch: Batch) -> dict[str, Tensor]:
    names = ("student_ids", "teacher_ids", "student_chunk_id", "teacher_chunk_id")
    return {name: getattr(batch, name) for name in names}


def random_alignment() -> Batch:
    chunks = oracle.random_chunk_ids(np.random.default_rng(1), 2, 14, 12)
    ids = oracle_prefix.random_ids(0, chunks, 7, 5)
    return Batch(random_logits(2, 14, 7, 0, 1.0), random_logits(2, 12, 5, 1, 1.0), *ids, *chunks, identity(1))


@cache
def real_alignment() -> Batch:
    """Texts that are cut where a sampler might; ids by their rank among those that occur, so that loops end."""
    tokenizers = real_tokenizer("qwen3"), real_tokenizer("llama3_1")
    aligner = TokenAligner(*tokenizers)
    rows = []
    for parts in (
        ("The arch", "ive cost 12345 €, ", "Grö", "ße 東京"),
        ("\ndistri", "butions * 77", "7\n   👍🏽 naïve"),
    ):
        student = [i for part in parts for i in encode(tokenizers[0], part)]
        teacher = encode(tokenizers[1], "".join(parts))
        found = aligner.align(student, teacher)
        rows.append((student, teacher, found.student_chunk_id, found.teacher_chunk_id))
    sides = [torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row[k]) for row in rows], True, -1) for k in range(4)]
    known, ids = zip(*(side.unique(return_inverse=True) for side in sides[:2]), strict=True)
    logits = (random_logits(*places.shape, len(own), 2, 1.0) for own, places in zip(known, ids, strict=True))
    return Batch(*logits, *ids, *sides[2:], identity(1))


@dataclass
class ByLoops:
    """What the loss is, chunk by chunk and token by token."""

    gradient: Tensor
    total: float = 0.0
    ratios: list[float] = field(default_factory=list)
    clipped: int = 0
    kd: float = 0.0

    @staticmethod
    def of(batch: Batch, logprobs: Tensor, estimator: str, update: str) -> "ByLoops":
        """Σ over units, weighted; ratios are cut at 0.8 and 1.3, or 1.5 where the advantage is negative."""
        sides = {name: side.tolist() for name, side in vars(batch).items() if name != "projection"}
        own = ByLoops(torch.zeros_like(batch.student))
        for chunk in oracle_prefix.chunks_of(sides["student_chunk_id"], sides["teacher_chunk_id"]):
            b = chunk.b
            s = oracle_prefix.log_likelihood(sides["student"][b], sides["student_ids"][b], chunk.student)
            t = oracle_prefix.log_likelihood(sides["teacher"][b], sides["teacher_ids"][b], chunk.teacher)
            ratio = math.exp(s - math.fsum(float(logprobs[b, i]) for i in chunk.student))
            slope = own._add(s - t, ratio, float(WEIGHTS[b]), estimator, update)
            for i in chunk.student:
                p = oracle.softmax(sides["student"][b][i - 1], 1)
                for v, mass in enumerate(p):
                    own.gradient[b, i - 1, v] += slope * ((v == sides["student_ids"][b][i]) - mass)
        return own

    def _add(self, d: float, ratio: float, weight: float, estimator: str, update: str) -> float:
        """The derivative by s."""
        estimate = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
        self.kd += ratio * (math.exp(-d) - 1 + d)
        if update == "direct":
            self.total += weight * ratio * estimate
            return weight * ratio * {"k2": d, "k3": 1 - math.exp(-d)}[estimator]
        advantage = -estimate
        gain = min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
        gain = max(gain, 1.5 * advantage) if advantage < 0 else gain
        self.total -= weight * gain
        self.ratios.append(ratio)
        is_clipped = gain != ratio * advantage
        self.clipped += is_clipped
        return 0.0 if is_clipped else -weight * ratio * advantage


@pytest.mark.tokenizers
@pytest.mark.parametrize("batch_of", [two_tokenizers, random_alignment, real_alignment])
@pytest.mark.parametrize(("estimator", "update"), WAYS)
def test_by_loops(batch_of, estimator, update):
    """Bugs: the ratio of a token instead of the chunk's, tokens of a chunk left out, a mean, the normalizer."""
    batch = batch_of()
    log_p = batch.student.log_softmax(-1)[:, :-1]
    logprobs = torch.zeros(batch.student_ids.shape, dtype=torch.float64)
    logprobs[:, 1:] = (
        log_p.gather(2, batch.student_ids[:, 1:, None]).squeeze(2) + 0.3 * random_logits(*log_p.shape, 9)[..., 0]
    )
    expected = ByLoops.of(batch, logprobs, estimator, update)
    student = batch.student.clone().requires_grad_()
    out = sampled_chunk_kl(
        student,
        batch.teacher,
        **chunk_arguments(batch),
        logprobs=logprobs,
        estimator=estimator,
        update=update,
        clip_high=0.3,
        dual_clip=1.5,
        sequence_weights=WEIGHTS,
        normalizer=11,
        chunk_size=2,
    )
    assert out.loss.item() == pytest.approx(expected.total / 11, rel=1e-11)
    torch.testing.assert_close(
        torch.autograd.grad(out.loss, student)[0], expected.gradient / 11, rtol=1e-10, atol=1e-13
    )
    count = out.metrics["kd"].count
    assert out.metrics["kd"].value() == pytest.approx(expected.kd / count, rel=1e-11)
    of_weights = {"policy/weight", "policy/weight_max", "policy/effective_share"}
    of_ratio = set() if update == "direct" else {"policy/clip_fraction", "policy/ratio"}
    assert out.metrics.keys() == {"kd"} | of_ratio | of_weights
    if update == "policy_gradient":
        assert 0 < expected.clipped < len(expected.ratios) == count
        assert out.metrics["policy/clip_fraction"].value() == expected.clipped / count
        assert out.metrics["policy/ratio"].value() == pytest.approx(math.fsum(expected.ratios) / count, rel=1e-11)


@pytest.mark.tokenizers
def test_real_alignments_have_chunks_of_every_kind():
    batch = real_alignment()
    lists = batch.student_chunk_id.tolist(), batch.teacher_chunk_id.tolist()
    lengths = {(len(chunk.student), len(chunk.teacher)) for chunk in oracle_prefix.chunks_of(*lists)}
    assert {(1, 1), (1, 3), (3, 1), (4, 2)} <= lengths


@pytest.mark.parametrize(("estimator", "update"), WAYS)
@pytest.mark.parametrize("is_old", [True, False])
def test_chunks_of_one_token_a_side_are_the_form_for_one_tokenizer(estimator, update, is_old):
    """To the bit, with the gradient and all metrics."""
    batch = one_tokenizer(3)
    options = {"estimator": estimator, "update": update, "clip_low": 0.1, "dual_clip": 1.5, "sequence_weights": WEIGHTS}
    if is_old:
        options["logprobs"] = random_logits(1, 2, 7, 5, 1.0)[0] - 2
    student = batch.student.requires_grad_()
    across = sampled_chunk_kl(student, batch.teacher, **chunk_arguments(batch), **options)
    mask = batch.student_chunk_id >= 0
    within = sampled_kl(student, batch.teacher, ids=batch.student_ids, mask=mask, **options)
    assert torch.equal(across.loss, within.loss)
    assert torch.equal(*(torch.autograd.grad(out.loss, student)[0] for out in (across, within)))
    assert {name: metric.value() for name, metric in across.metrics.items()} == {
        name: metric.value() for name, metric in within.metrics.items()
    }


def test_logprobs_of_another_shape_are_named():
    batch = two_tokenizers()
    with pytest.raises(ConfigError, match="logprobs has shape"):
        sampled_chunk_kl(batch.student, batch.teacher, **chunk_arguments(batch), logprobs=torch.zeros(2, 3))


STUDENT = ("a", "b", "ab")
LOOKS_AHEAD = ("a", "b", "ba")
"""Whether a `b` is a chunk of its own depends on what follows it."""
SHORTER = ("a", "b")
"""Every token of the student is a chunk."""
LENGTH = 3


def greedy(text: str, pieces: tuple[str, ...]) -> tuple[int, ...]:
    """Ids of the longest piece at every place."""
    if not text:
        return ()
    best = max((piece for piece in pieces if text.startswith(piece)), key=len)
    return (pieces.index(best), *greedy(text[len(best) :], pieces))


def spelled(ids: tuple[int, ...]) -> str:
    return "".join(STUDENT[i] for i in ids)


class Language:
    """Student and teacher as tables of logits by prefix, all that the student can say, and its chunks."""

    def __init__(self, pieces: tuple[str, ...], seed: int) -> None:
        self.pieces = pieces
        prefixes = [ids for n in range(LENGTH) for ids in product(range(len(STUDENT)), repeat=n)]
        self.row = {ids: i for i, ids in enumerate(prefixes)}
        self.table = random_logits(1, len(prefixes), len(STUDENT), seed, 1.0)[0]
        self.texts = list(product(range(len(STUDENT)), repeat=LENGTH))
        self.theirs = [greedy(spelled(ids), pieces) for ids in self.texts]
        teacher_prefixes = sorted({ids[:n] for ids in self.theirs for n in range(len(ids))})
        self.teacher_row = {ids: i for i, ids in enumerate(teacher_prefixes)}
        self.teacher_table = random_logits(1, len(teacher_prefixes), len(pieces), seed + 1, 1.0)[0].log_softmax(-1)

    def log_p(self, table: Tensor, start: tuple[int, ...], ids: tuple[int, ...]) -> Tensor:
        log_p = table.log_softmax(-1)
        return sum(log_p[self.row[start + ids[:k]], i] for k, i in enumerate(ids))

    def log_q(self, start: str, text: str) -> Tensor:
        before, ids = greedy(start, self.pieces), greedy(start + text, self.pieces)
        rows = range(len(before), len(ids))
        return sum(self.teacher_table[self.teacher_row[ids[:k]], ids[k]] for k in rows)

    def chunks(self, ids: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(h, a) of each: it begins and ends where both sides have cut the text, and neither does between."""
        theirs = greedy(spelled(ids), self.pieces)
        ends = {sum(len(self.pieces[i]) for i in theirs[: k + 1]) for k in range(len(theirs))}
        cuts = [0, *(k for k in range(1, LENGTH + 1) if len(spelled(ids[:k])) in ends)]
        return [(ids[:start], ids[start:stop]) for start, stop in pairwise(cuts)]

    def weights(self, sampled_by: Tensor) -> dict[tuple[tuple[int, ...], tuple[int, ...]], float]:
        """How often h is written, and a is a chunk once it is written after it: p(h) · ρ(a|h)."""
        found: dict = defaultdict(float)
        for ids in self.texts:
            for start, chunk in self.chunks(ids):
                found[start, chunk] += float(
                    (self.log_p(sampled_by, (), ids) - self.log_p(sampled_by, start, chunk)).exp()
                )
        return found

    def expected_loss(self, table: Tensor, sampled_by: Tensor, **options) -> Tensor:
        """E of the sum over chunks: all texts, each weighted by how often it is sampled. Token 0 has no text."""
        longest = max(map(len, self.theirs))
        student = torch.stack([table[[self.row[ids[:k]] for k in range(LENGTH)]] for ids in self.texts])
        teacher = torch.zeros(len(self.texts), longest + 1, len(self.pieces), dtype=torch.float64)
        chunk_ids = torch.full((len(self.texts), LENGTH + 1), -1), torch.full((len(self.texts), longest + 1), -1)
        token_ids = torch.zeros_like(chunk_ids[0]), torch.zeros_like(chunk_ids[1])
        logprobs = torch.zeros(token_ids[0].shape, dtype=torch.float64)
        for b, (ids, theirs) in enumerate(zip(self.texts, self.theirs, strict=True)):
            token_ids[0][b, 1:], token_ids[1][b, 1 : len(theirs) + 1] = torch.tensor(ids), torch.tensor(theirs)
            logprobs[b, 1:] = torch.stack([self.log_p(sampled_by, ids[:k], ids[k : k + 1]) for k in range(LENGTH)])
            teacher[b, : len(theirs)] = self.teacher_table[[self.teacher_row[theirs[:k]] for k in range(len(theirs))]]
            for c, (start, chunk) in enumerate(self.chunks(ids)):
                places = [len(greedy(spelled(part), self.pieces)) for part in (start, start + chunk)]
                chunk_ids[0][b, len(start) + 1 : len(start) + len(chunk) + 1] = c
                chunk_ids[1][b, places[0] + 1 : places[1] + 1] = c
        sides = zip(
            ("student_ids", "teacher_ids", "student_chunk_id", "teacher_chunk_id"),
            (*token_ids, *chunk_ids),
            strict=True,
        )
        last = torch.zeros(len(self.texts), 1, len(STUDENT), dtype=torch.float64)
        return sampled_chunk_kl(
            torch.cat([student, last], 1),
            teacher,
            **dict(sides),
            logprobs=logprobs,
            sequence_weights=logprobs.sum(1).exp(),
            normalizer=1,
            clip_low=1 - 1e-9,
            clip_high=1e9,
            **options,
        ).loss


def generalised_kl(language: Language, table: Tensor, sampled_by: Tensor) -> dict[str, Tensor]:
    """Σ p(h) ρ(a|h) [P log(P/Q) − P + Q], and with P and Q exchanged."""
    found = dict.fromkeys(("reverse", "forward"), torch.zeros((), dtype=torch.float64))
    for (start, chunk), weight in language.weights(sampled_by).items():
        log_p, log_q = language.log_p(table, start, chunk), language.log_q(spelled(start), spelled(chunk))
        p, q = log_p.exp(), log_q.exp()
        found["reverse"] = found["reverse"] + weight * (p * (log_p - log_q) - p + q)
        found["forward"] = found["forward"] + weight * (q * (log_q - log_p) - q + p)
    return found


EXPECTED = [("k1", "policy_gradient", "reverse"), ("k2", "direct", "reverse"), ("k3", "direct", "forward")]


@pytest.mark.parametrize("pieces", [LOOKS_AHEAD, SHORTER])
@pytest.mark.parametrize(("estimator", "update", "kind"), EXPECTED)
def test_expected_gradient(pieces, estimator, update, kind):
    """Bugs: chunks that are no action of their own tokens, an advantage that is differentiated, a sign."""
    language = Language(pieces, seed=0)
    table = language.table.requires_grad_()
    found = language.expected_loss(table, table.detach(), estimator=estimator, update=update)
    wanted = generalised_kl(language, table, table.detach())
    torch.testing.assert_close(
        *(torch.autograd.grad(v, table)[0] for v in (found, wanted[kind])), rtol=1e-10, atol=1e-14
    )
    if estimator == "k3":
        torch.testing.assert_close(found, wanted["reverse"], rtol=1e-11, atol=0)


@pytest.mark.parametrize(("estimator", "update", "kind"), EXPECTED)
def test_where_every_token_is_a_chunk_it_is_the_kl_of_next_tokens(estimator, update, kind):
    language = Language(SHORTER, seed=4)
    table = language.table.requires_grad_()
    wanted = torch.zeros((), dtype=torch.float64)
    for start in language.row:
        how_often = language.log_p(table.detach(), (), start).exp() if start else 1.0
        log_p = table[language.row[start]].log_softmax(-1)
        log_q = torch.stack([language.log_q(spelled(start), piece) for piece in STUDENT])
        of_next = {"reverse": log_p.exp() * (log_p - log_q), "forward": log_q.exp() * (log_q - log_p)}
        wanted = wanted + how_often * of_next[kind].sum()
    found = language.expected_loss(table, table.detach(), estimator=estimator, update=update)
    torch.testing.assert_close(*(torch.autograd.grad(v, table)[0] for v in (found, wanted)), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("estimator", "update", "kind"), EXPECTED)
def test_samples_of_another_policy_are_weighed_by_the_ratio_of_the_chunk(estimator, update, kind):
    """With the ratio of each token alone, the other tokens of its chunk would be those of the old policy; without one,
    as `direct` was, all of them.
    """
    language = Language(LOOKS_AHEAD, seed=0)
    old = language.table + random_logits(1, *language.table.shape, 7, 0.5)[0]
    table = language.table.requires_grad_()
    found = language.expected_loss(table, old, estimator=estimator, update=update)
    wanted = generalised_kl(language, table, old)[kind]
    torch.testing.assert_close(*(torch.autograd.grad(v, table)[0] for v in (found, wanted)), rtol=1e-10, atol=1e-14)


def test_the_teacher_that_looks_ahead_does_and_the_other_does_not():
    """What the tests above are about: chunks of several tokens, and a token that is only sometimes a chunk."""
    looking, shorter = Language(LOOKS_AHEAD, seed=0), Language(SHORTER, seed=0)
    assert {len(chunk) for ids in looking.texts for _, chunk in looking.chunks(ids)} == {1, 2, 3}
    assert 0 < looking.weights(looking.table)[(), (1,)] < 0.9
    assert shorter.weights(shorter.table)[(), (1,)] == pytest.approx(1, rel=1e-12)
