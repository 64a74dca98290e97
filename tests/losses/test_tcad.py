"""TCAD against plain loops (methods.md §10.2), and the choice of its support."""

import math

import pytest
import torch

from nemo_opd.errors import ConfigError
from nemo_opd.losses import same_vocab, tcad
from nemo_opd.losses.tcad import interleaved

from . import oracle
from .cases import random_logits
from .oracle_support import top

V = 9
MASK = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 1, 1, 0], [1, 0, 0, 0, 0]])
"""3, 2 and no scored tokens."""
WEIGHTS = [0.3, 0.7, 1.0]


def by_turns(z_t: list[float], z_s: list[float], size: int) -> list[int]:
    ranked = [sorted(range(len(side)), key=lambda column: -side[column]) for side in (z_t, z_s)]
    chosen: list[int] = []
    for pair in zip(*ranked, strict=True):
        chosen += [column for column in dict.fromkeys(pair) if column not in chosen]
    return chosen[:size]


def of_token(
    z_t: list[float], z_s: list[float], kind: str, size: int, coef: float, tau: float, support: str, **weights
):
    chosen = by_turns(z_t, z_s, size) if support == "interleaved" else sorted(top(z_t, size) | top(z_s, size))
    q, p = ([oracle.softmax(z, tau)[column] for column in chosen] for z in (z_t, z_s))
    covered = math.fsum(p)
    divergence = oracle.divergence([x / math.fsum(q) for x in q], [x / covered for x in p], kind, **weights)
    return tau**2 * (divergence - coef * math.log(covered))


def by_loops(student, teacher, sequence_weights: list[float], divisor: float, **options) -> float:
    total = 0.0
    for z_s, z_t, scored, weight in zip(
        student.tolist(), teacher.tolist(), MASK.tolist(), sequence_weights, strict=True
    ):
        own = [of_token(z_t[i - 1], z_s[i - 1], **options) for i in range(1, 5) if scored[i]]
        total += weight * math.fsum(own) / len(own) if own else 0.0
    return total / divisor


@pytest.mark.parametrize("support", ["interleaved", "union"])
@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_value_equals_the_loop(kind, weights, support):
    """Bugs: τ² on one of the two summands, a mean over tokens, coverage of the renormalised p, padded columns."""
    student, teacher = random_logits(3, 5, V + 2, 0), random_logits(3, 5, V, 1)
    student[..., V:] = 30.0
    chosen = {"support": support, **weights}
    settings = {"divergence": kind, "support_size": 4, "coverage_coef": 0.6, "temperature": 1.7, **chosen}
    arguments = {"kind": kind, "size": 4, "coef": 0.6, "tau": 1.7, **chosen}
    plain = tcad(student, teacher, mask=MASK, chunk_size=2, **settings)
    assert float(plain.loss) == pytest.approx(by_loops(student[..., :V], teacher, [1, 1, 1], 2, **arguments), rel=1e-12)
    assert plain.metrics["kd"].count == 5
    weighted = tcad(
        student, teacher, mask=MASK, sequence_weights=torch.tensor(WEIGHTS, dtype=torch.float64), **settings
    )
    expected = by_loops(student[..., :V], teacher, WEIGHTS, 1.0, **arguments)
    assert float(weighted.loss) == pytest.approx(expected, rel=1e-12), "one prompt: the weights of what is scored are 1"


def test_forward_kl_with_coverage_is_the_kl_of_the_teacher_on_the_support_and_the_whole_student():
    """methods.md §10.2; value and gradient, from autograd on log-probabilities."""
    student, teacher = random_logits(3, 5, V, 2).requires_grad_(), random_logits(3, 5, V, 3)
    loss = tcad(student, teacher, mask=MASK, support_size=4, normalizer=7).loss
    expected = torch.zeros((), dtype=torch.float64)
    for b in range(3):
        scored = [i for i in range(1, 5) if MASK[b, i]]
        for i in scored:
            z_t, z_s = teacher[b, i - 1], student[b, i - 1]
            chosen = by_turns(z_t.tolist(), z_s.tolist(), 4)
            log_q = z_t[chosen].log_softmax(0)
            expected = expected + (log_q.exp() * (log_q - z_s.log_softmax(0)[chosen])).sum() / len(scored) / 7
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(value, student)[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-15)


def test_with_every_token_it_is_same_vocab_by_sequence():
    student, teacher = random_logits(3, 5, V, 4), random_logits(3, 5, V, 5)
    found = tcad(student, teacher, mask=MASK, support_size=V, divergence="jsd").loss
    rows = [same_vocab(student[b : b + 1], teacher[b : b + 1], mask=MASK[b : b + 1], divergence="jsd") for b in (0, 1)]
    torch.testing.assert_close(found, sum(row.loss for row in rows) / 2, rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_the_support_is_taken_by_turns(size):
    """Ranks of both sides that overlap in part; the teacher's likeliest is always in."""
    teacher = random_logits(1, 20, 50, 6)[0]
    student = teacher + random_logits(1, 20, 50, 7, 1.0)[0]
    found = interleaved(teacher, student, size).index
    for row, z_t, z_s in zip(found.tolist(), teacher.tolist(), student.tolist(), strict=True):
        assert row == by_turns(z_t, z_s, size)


def test_coverage_does_not_round_to_zero():
    """fp32: a student with all but e^−20 of its mass on the support still learns of the rest."""
    student = torch.tensor([[[20.0, 20.0, 0.0], [0.0, 0.0, 0.0]]]).requires_grad_()
    teacher = torch.tensor([[[20.0, 20.0, 0.0], [0.0, 0.0, 0.0]]])
    loss = tcad(student, teacher, mask=torch.tensor([[0, 1]]), support_size=2).loss
    (gradient,) = torch.autograd.grad(loss, student)
    assert float(loss.detach()) == pytest.approx(math.exp(-20) / 2, rel=1e-5)
    assert float(gradient[0, 0, 2]) == pytest.approx(math.exp(-20) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"support": "full"}, "support='full'.*interleaved, union"),
        ({"support_size": 0}, "support_size=0"),
        ({"coverage_coef": -1.0}, "coverage_coef=-1.0"),
    ],
)
def test_what_does_not_fit_is_named(wrong, message):
    logits = random_logits(3, 5, V, 0)
    with pytest.raises(ConfigError, match=message):
        tcad(logits, logits, mask=MASK, **wrong)
