"""Weights of what another policy sampled: expectations by enumeration, loops, cuts of a batch (methods.md §11)."""

import math

import pytest
import torch
from torch import Tensor

from nemo_opd.losses import grpo, sampled_kl
from nemo_opd.types import EffectiveShare

from .cases import random_logits

V = 6
ONE = torch.tensor([[0, 1]])
CUTS = [(1.0, 4, 1.0), (0.6, None, 0.8), (1.4, 3, 0.9)]
"""Temperature, top-k, top-p."""


def warped(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """The policy that samples: temperature, top-k, then top-p, by loops."""
    p = (logits.detach() / temperature).softmax(-1)
    order = p.argsort(descending=True).tolist()[:top_k]
    of_those, kept, mass = float(p[order].sum()), [], 0.0
    for token in order:
        if kept and mass >= top_p * of_those:
            break
        kept.append(token)
        mass += float(p[token])
    cut = torch.zeros_like(p)
    cut[kept] = p[kept] / p[kept].sum()
    return cut


def expectation(
    student: Tensor, teacher: Tensor, behaviour: Tensor, old: Tensor | None = None, **options
) -> tuple[Tensor, float]:
    """Over the token ~ behaviour, of the gradient [V] at the position that predicts it, and of the metric `kd`.

    old: logits of the weights that sampled; None: the student's.
    """
    log_p, gradient, kd = (student if old is None else old).log_softmax(0), torch.zeros(V, dtype=torch.float64), 0.0
    for token in behaviour.nonzero().flatten().tolist():
        leaf = torch.stack([student, student])[None].requires_grad_()
        out = sampled_kl(
            leaf,
            torch.stack([teacher, teacher])[None],
            ids=torch.tensor([[0, token]]),
            mask=ONE,
            logprobs=torch.stack([log_p[0], log_p[token]])[None],
            behaviour_logprobs=torch.stack([log_p[0], behaviour[token].log()])[None],
            **options,
        )
        gradient += behaviour[token] * torch.autograd.grad(out.loss, leaf)[0][0, 0]
        kd += float(behaviour[token]) * out.metrics["kd"].value()
    return gradient, kd


def objective(student: Tensor, teacher: Tensor, on: Tensor, *, forward: bool = False) -> tuple[Tensor, float]:
    """Gradient [V] and value of Σ_S [p log(p/q) − p + q], or with p and q exchanged; on: bool [V]."""
    leaf = student.detach().requires_grad_()
    p, q = leaf.softmax(0)[on], teacher.softmax(0)[on]
    value = (q * (q / p).log() - q + p if forward else p * (p / q).log() - p + q).sum()
    return torch.autograd.grad(value, leaf)[0], value.item()


SIDES = [(random_logits(1, 1, V, seed, 1.5)[0, 0], random_logits(1, 1, V, seed + 50, 1.5)[0, 0]) for seed in range(5)]


EXPECTED = [("k1", "policy_gradient", False), ("k2", "direct", False), ("k3", "direct", True)]
"""Estimator, update, and whether the gradient is that of the forward KL."""


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize(("estimator", "update", "forward"), EXPECTED)
def test_at_any_temperature_the_gradient_is_that_of_the_kl(temperature, estimator, update, forward):
    """Bugs: a ratio to the raw log-probability, which at 0.6 is off by half of the gradient."""
    for student, teacher in SIDES:
        behaviour = warped(student, temperature)
        found, kd = expectation(student, teacher, behaviour, estimator=estimator, update=update)
        everything = torch.ones(V, dtype=torch.bool)
        expected, _ = objective(student, teacher, everything, forward=forward)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
        assert kd == pytest.approx(objective(student, teacher, everything)[1], rel=1e-10)


@pytest.mark.parametrize("temperature", [0.8, 1.0])
@pytest.mark.parametrize(("estimator", "update", "forward"), EXPECTED)
def test_samples_of_older_weights_have_the_gradient_and_the_metric_of_the_student(
    temperature, estimator, update, forward
):
    """Bugs: an estimate that is differentiated with the weight π_old / π_behaviour: the gradient was off by a third."""
    everything, unclipped = torch.ones(V, dtype=torch.bool), {"clip_low": 0.999, "clip_high": 1e9}
    for seed, (student, teacher) in enumerate(SIDES):
        old = student + random_logits(1, 1, V, seed + 90, 0.4)[0, 0]
        options = {"estimator": estimator, "update": update} | (unclipped if update == "policy_gradient" else {})
        found, kd = expectation(student, teacher, warped(old, temperature), old, **options)
        expected, _ = objective(student, teacher, everything, forward=forward)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
        assert kd == pytest.approx(objective(student, teacher, everything)[1], rel=1e-10)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), CUTS)
def test_where_tokens_are_cut_it_is_that_of_the_kl_on_the_others(temperature, top_k, top_p):
    """And not that of the whole KL: of what cannot be sampled nothing is learned."""
    for student, teacher in SIDES:
        behaviour = warped(student, temperature, top_k, top_p)
        assert 0 < (behaviour > 0).sum() < V
        on = behaviour > 0
        for options in ({}, {"estimator": "k2", "update": "direct"}):
            found, kd = expectation(student, teacher, behaviour, **options)
            expected, value = objective(student, teacher, on)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
            assert kd == pytest.approx(value, rel=1e-10)
        whole, _ = objective(student, teacher, torch.ones(V, dtype=torch.bool))
        assert (found - whole).abs().max() > 1e-3


def sequences_of_two() -> Tensor:
    """[V², 3]: a token that was given, then two."""
    first, second = torch.arange(V).repeat_interleave(V), torch.arange(V).repeat(V)
    return torch.stack([torch.zeros_like(first), first, second], 1)


def table_logits(table: Tensor, ids: Tensor) -> Tensor:
    """What follows a token by a table [V, V] of logits: [B, S, V]."""
    return table[ids]


@pytest.mark.parametrize(("level", "is_exact"), [("sequence", True), ("token", False)])
def test_whole_sequences_are_corrected_by_their_product(level, is_exact):
    """Σ over all sequences of P(sequence) · A: the weights of tokens leave their prefixes as they were sampled."""
    table, ids = random_logits(1, V, V, 3, 1.0)[0].requires_grad_(), sequences_of_two()
    advantages = random_logits(1, 1, V * V, 4, 1.0)[0, 0]
    logits = table_logits(table, ids)
    raw, behaviour = torch.zeros(2, V * V, 3, dtype=torch.float64)
    for own, temperature in ((raw, 1.0), (behaviour, 0.7)):
        log_p = (logits.detach() / temperature).log_softmax(-1)
        own[:, 1:] = log_p[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    # Each sequence as often as it is sampled: its advantage times its probability.
    often = behaviour.sum(1).exp()
    given = {"ids": ids, "mask": torch.tensor([[0, 1, 1]]).expand(V * V, 3), "logprobs": raw}
    out = grpo(
        logits,
        **given,
        behaviour_logprobs=behaviour,
        advantages=advantages * often,
        dual_clip=None,
        importance_level=level,
        importance_cap=1e6,
        normalizer=1,
    )
    (found,) = torch.autograd.grad(out.loss, table)
    leaf = table.detach().requires_grad_()
    log_p = table_logits(leaf, ids)[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    (expected,) = torch.autograd.grad(-(log_p.sum(1).exp() * advantages).sum(), leaf)

    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-14) == is_exact
    assert torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), 0) > 0.9


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Three sequences that were sampled at 0.7 by a model that has moved since, the last of them empty."""
    ids = torch.arange(15).view(3, 5) % 7
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]])
    logits = random_logits(3, 5, 7, seed, 1.0)
    before = logits + random_logits(3, 5, 7, seed + 1, 0.15)
    raw, behaviour = torch.zeros(2, 3, 5, dtype=torch.float64)
    for own, temperature in ((raw, 1.0), (behaviour, 0.7)):
        log_p = (before / temperature).log_softmax(-1)
        own[:, 1:] = log_p[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    return {"logits": logits, "ids": ids, "mask": mask, "logprobs": raw, "behaviour_logprobs": behaviour}


ADVANTAGES = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)
SETTINGS = [
    {},
    {"importance_cap": 1.1},
    {"importance_cap": 1.1, "importance_veto": 0.9},
    {"importance_cap": 1.2, "importance_level": "sequence"},
    {"importance_cap": 0.5, "importance_level": "sequence", "importance_veto": 0.9},
]


def by_loops(given: dict[str, Tensor], cap=math.inf, level="token", veto=0.0, low=0.2, high=0.28, dual=3.0):
    """The loss, its gradient with respect to the logits, and what is said of the weights."""
    logits, total, weights, used, vetoed = given["logits"].detach().requires_grad_(), 0.0, [], [], 0
    log_p = logits.log_softmax(-1)
    for b in range(3):
        places = [i for i in range(1, 5) if given["mask"][b, i]]
        own = {i: log_p[b, i - 1, int(given["ids"][b, i])] for i in places}
        each = {i: math.exp(own[i].item() - given["behaviour_logprobs"][b, i].item()) for i in places}
        is_kept = all(weight >= veto for weight in each.values())
        vetoed += not is_kept
        for i in places:
            weight = math.prod(each.values()) if level == "sequence" else each[i]
            ratio = (own[i] - given["logprobs"][b, i]).exp()
            advantage = float(ADVANTAGES[b])
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
            gain = torch.maximum(gain, torch.tensor(dual * advantage)) if advantage < 0 else gain
            total = total - is_kept * min(weight, cap) / ratio.item() * gain
            weights.append(weight)
            used.append(is_kept * min(weight, cap))
    (gradient,) = torch.autograd.grad(total, logits)
    count = len(weights)
    said = {
        "policy/weight": math.fsum(weights) / count,
        "policy/weight_max": max(weights),
        "policy/effective_share": math.fsum(used) ** 2 / (count * math.fsum(x * x for x in used)),
    }
    said |= {"policy/truncated_fraction": sum(w > cap for w in weights) / count} if cap < math.inf else {}
    said |= {"policy/vetoed_fraction": vetoed / 2} if veto else {}
    return total.item(), gradient, said


def run(given: dict[str, Tensor], advantages: Tensor = ADVANTAGES, **options):
    arguments = {name: value for name, value in given.items() if name != "logits"}
    logits = given["logits"].detach().requires_grad_()
    out = grpo(logits, **arguments, advantages=advantages, **options)
    return out, torch.autograd.grad(out.loss, logits)[0]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_weights_by_loops(options):
    """Truncation, products over sequences, the veto, and what is said of each."""
    given = batch()
    total, gradient, said = by_loops(given, **{name.removeprefix("importance_"): x for name, x in options.items()})
    out, found = run(given, **options, normalizer=4, chunk_size=2)
    assert out.loss.item() == pytest.approx(total / 4, rel=1e-11)
    torch.testing.assert_close(found, gradient / 4, rtol=1e-10, atol=1e-14)
    metrics = {name: out.metrics[name].value() for name in said}
    assert metrics == pytest.approx(said, rel=1e-11)
    if "importance_veto" in options:
        assert 0 < said["policy/vetoed_fraction"] < 1
    if "importance_cap" in options:
        assert said["policy/truncated_fraction"] > 0


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_weights_do_not_depend_on_how_a_batch_is_cut(options):
    """Microbatches, padding, hidden states; a vetoed sequence stays in the divisor. Bugs: a rate by microbatch."""
    given = batch()
    out, gradient = run(given, **options, normalizer=6)
    parts = [
        run({name: x[[b]] for name, x in given.items()}, ADVANTAGES[[b]], **options, normalizer=6) for b in range(3)
    ]
    padded = {name: torch.nn.functional.pad(x, (0, 2)) for name, x in given.items() if name != "logits"}
    padded["logits"] = torch.nn.functional.pad(given["logits"], (0, 0, 0, 2), value=5.0)
    wide, wide_gradient = run(padded, **options, normalizer=6)
    for loss, found in (
        (sum(part.loss for part, _ in parts), torch.cat([each for _, each in parts])),
        (wide.loss, wide_gradient[:, :5]),
    ):
        torch.testing.assert_close(loss, out.loss, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-15)
    for name, metric in out.metrics.items():
        pooled = parts[0][0].metrics[name]
        for part, _ in parts[1:]:
            pooled = pooled.merge(part.metrics[name])
        assert pooled.value() == pytest.approx(metric.value(), rel=1e-12, abs=1e-15)


def test_a_fresh_student_is_not_clipped_however_it_was_sampled():
    """Bugs: a clip that sees the temperature: at 0.5 nearly all ratios to the behaviour lie outside of 0.8 to 1.2."""
    given = batch()
    log_p = given["logits"].log_softmax(-1)
    given["logprobs"][:, 1:] = log_p[:, :-1].gather(2, given["ids"][:, 1:, None]).squeeze(2)
    out, _ = run(given)
    assert out.metrics["policy/clip_fraction"].value() == 0
    assert out.metrics["policy/ratio"].value() == pytest.approx(1, rel=1e-12)
    assert out.metrics["policy/weight_max"].value() > 1.2


def test_without_warping_nothing_changes():
    """To the bit: the same as where the engine's log-probabilities are all there is."""
    given = batch()
    del given["behaviour_logprobs"]
    plain, gradient = run(given)
    out, found = run(given | {"behaviour_logprobs": given["logprobs"].clone()})
    assert torch.equal(out.loss, plain.loss)
    assert torch.equal(found, gradient)


def test_what_is_cut_or_dropped_does_not_look_like_agreement():
    """Bugs: a metric `kd` of 0 where every sequence was dropped."""
    given = batch()
    logits, teacher = given.pop("logits"), random_logits(3, 5, 7, 9, 1.0)
    plain, dropped = (
        sampled_kl(logits, teacher, **given, importance_cap=0.1, importance_veto=veto).metrics for veto in (None, 0.999)
    )
    assert dropped["policy/vetoed_fraction"].value() > 0
    assert (
        dropped["kd"].value() == plain["kd"].value() == sampled_kl(logits, teacher, **given).metrics["kd"].value() > 0
    )


def test_the_effective_share_is_of_all_that_is_merged():
    weights = [[1.0, 3.0], [2.0], []]
    merged = EffectiveShare(0.0, 0.0, 0)
    for part in weights:
        merged = merged.merge(EffectiveShare(sum(part), sum(x * x for x in part), len(part)))
    assert merged.value() == pytest.approx(36 / (3 * 14))
    assert EffectiveShare(0.0, 0.0, 0).value() == 0
