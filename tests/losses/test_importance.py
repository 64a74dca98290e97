"""Importance weights of tokens that another policy sampled: enumeration, loops, cuts of a batch (methods.md §11)."""

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
    """Return the sampling policy: temperature, top-k, then top-p, with loops."""
    p = (logits.detach() / temperature).softmax(-1)
    order = p.argsort(descending=True).tolist()[:top_k]
    total, tokens, mass = float(p[order].sum()), [], 0.0
    for token in order:
        if tokens and mass >= top_p * total:
            break
        tokens.append(token)
        mass += float(p[token])
    cut = torch.zeros_like(p)
    cut[tokens] = p[tokens] / p[tokens].sum()
    return cut


def expectation(
    student: Tensor, teacher: Tensor, behaviour: Tensor, old: Tensor | None = None, **options
) -> tuple[Tensor, float]:
    """Return the expected gradient [V] at the predicting position, and the expected `kd`, for a token ~ behaviour.

    old: logits of the weights that sampled (default: the student's).
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
    """Gradient [V] and value of Σ_S [p log(p/q) − p + q], or with p and q exchanged. on: bool [V], the set S."""
    leaf = student.detach().requires_grad_()
    p, q = leaf.softmax(0)[on], teacher.softmax(0)[on]
    value = (q * (q / p).log() - q + p if forward else p * (p / q).log() - p + q).sum()
    return torch.autograd.grad(value, leaf)[0], value.item()


SIDES = [(random_logits(1, 1, V, seed, 1.5)[0, 0], random_logits(1, 1, V, seed + 50, 1.5)[0, 0]) for seed in range(5)]


EXPECTED = [("k1", "policy_gradient", False), ("k2", "direct", False), ("k3", "direct", True)]
"""Estimator, update, and whether the expected gradient is the forward KL's."""


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize(("estimator", "update", "forward"), EXPECTED)
def test_at_any_temperature_the_gradient_is_the_kls(temperature, estimator, update, forward):
    """Bug: a ratio to the raw log-probability, which at 0.6 changes the gradient by half."""
    for student, teacher in SIDES:
        behaviour = warped(student, temperature)
        gradient, kd = expectation(student, teacher, behaviour, estimator=estimator, update=update)
        every_token = torch.ones(V, dtype=torch.bool)
        expected, _ = objective(student, teacher, every_token, forward=forward)
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)
        assert kd == pytest.approx(objective(student, teacher, every_token)[1], rel=1e-10)


@pytest.mark.parametrize("temperature", [0.8, 1.0])
@pytest.mark.parametrize(("estimator", "update", "forward"), EXPECTED)
def test_samples_of_older_weights_have_the_gradient_and_the_metric_of_the_student(
    temperature, estimator, update, forward
):
    """Bug: an estimate that is differentiated with the weight π_old / π_behaviour; the gradient is off by a third."""
    every_token, unclipped = torch.ones(V, dtype=torch.bool), {"clip_low": 0.999, "clip_high": 1e9}
    for seed, (student, teacher) in enumerate(SIDES):
        old = student + random_logits(1, 1, V, seed + 90, 0.4)[0, 0]
        options = {"estimator": estimator, "update": update} | (unclipped if update == "policy_gradient" else {})
        gradient, kd = expectation(student, teacher, warped(old, temperature), old, **options)
        expected, _ = objective(student, teacher, every_token, forward=forward)
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)
        assert kd == pytest.approx(objective(student, teacher, every_token)[1], rel=1e-10)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), CUTS)
def test_with_cut_tokens_the_gradient_is_the_kls_on_the_remaining_tokens(temperature, top_k, top_p):
    """Bug: the full KL's gradient is claimed, although tokens that cannot be sampled teach nothing."""
    for student, teacher in SIDES:
        behaviour = warped(student, temperature, top_k, top_p)
        assert 0 < (behaviour > 0).sum() < V
        on = behaviour > 0
        for options in ({}, {"estimator": "k2", "update": "direct"}):
            gradient, kd = expectation(student, teacher, behaviour, **options)
            expected, value = objective(student, teacher, on)
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)
            assert kd == pytest.approx(value, rel=1e-10)
        full_gradient, _ = objective(student, teacher, torch.ones(V, dtype=torch.bool))
        assert (gradient - full_gradient).abs().max() > 1e-3


def sequences_of_two() -> Tensor:
    """[V², 3]: a prompt token, then two sampled ones."""
    first, second = torch.arange(V).repeat_interleave(V), torch.arange(V).repeat(V)
    return torch.stack([torch.zeros_like(first), first, second], 1)


def table_logits(table: Tensor, ids: Tensor) -> Tensor:
    """Return logits [B, S, V] of the next token from a table [V, V]."""
    return table[ids]


@pytest.mark.parametrize(("level", "is_exact"), [("sequence", True), ("token", False)])
def test_whole_sequences_are_corrected_by_their_product(level, is_exact):
    """Σ over all sequences of P(sequence) · A. Weights of single tokens leave their prefixes as they were sampled."""
    table, ids = random_logits(1, V, V, 3, 1.0)[0].requires_grad_(), sequences_of_two()
    advantages = random_logits(1, 1, V * V, 4, 1.0)[0, 0]
    logits = table_logits(table, ids)
    raw, behaviour = torch.zeros(2, V * V, 3, dtype=torch.float64)
    for logprobs, temperature in ((raw, 1.0), (behaviour, 0.7)):
        log_p = (logits.detach() / temperature).log_softmax(-1)
        logprobs[:, 1:] = log_p[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    # Each sequence is weighted by how often it is sampled: its advantage times its probability.
    often = behaviour.sum(1).exp()
    inputs = {"ids": ids, "mask": torch.tensor([[0, 1, 1]]).expand(V * V, 3), "logprobs": raw}
    out = grpo(
        logits,
        **inputs,
        behaviour_logprobs=behaviour,
        advantages=advantages * often,
        dual_clip=None,
        importance_level=level,
        importance_cap=1e6,
        normalizer=1,
    )
    (gradient,) = torch.autograd.grad(out.loss, table)
    leaf = table.detach().requires_grad_()
    log_p = table_logits(leaf, ids)[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    (expected,) = torch.autograd.grad(-(log_p.sum(1).exp() * advantages).sum(), leaf)

    assert torch.allclose(gradient, expected, rtol=1e-10, atol=1e-14) == is_exact
    assert torch.nn.functional.cosine_similarity(gradient.flatten(), expected.flatten(), 0) > 0.9


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Three sequences sampled at 0.7 from a model that has changed since; the last one is empty."""
    ids = torch.arange(15).view(3, 5) % 7
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]])
    logits = random_logits(3, 5, 7, seed, 1.0)
    old_logits = logits + random_logits(3, 5, 7, seed + 1, 0.15)
    raw, behaviour = torch.zeros(2, 3, 5, dtype=torch.float64)
    for logprobs, temperature in ((raw, 1.0), (behaviour, 0.7)):
        log_p = (old_logits / temperature).log_softmax(-1)
        logprobs[:, 1:] = log_p[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    return {"logits": logits, "ids": ids, "mask": mask, "logprobs": raw, "behaviour_logprobs": behaviour}


ADVANTAGES = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)
SETTINGS = [
    {},
    {"importance_cap": 1.1},
    {"importance_cap": 1.1, "importance_veto": 0.9},
    {"importance_cap": 1.2, "importance_level": "sequence"},
    {"importance_cap": 0.5, "importance_level": "sequence", "importance_veto": 0.9},
]


def by_loops(inputs: dict[str, Tensor], cap=math.inf, level="token", veto=0.0, low=0.2, high=0.28, dual=3.0):
    """Return the loss, its gradient with respect to the logits, and the metrics of the weights."""
    logits, total, weights, used, vetoed = inputs["logits"].detach().requires_grad_(), 0.0, [], [], 0
    log_p = logits.log_softmax(-1)
    for b in range(3):
        places = [i for i in range(1, 5) if inputs["mask"][b, i]]
        token_log_p = {i: log_p[b, i - 1, int(inputs["ids"][b, i])] for i in places}
        token_weights = {i: math.exp(token_log_p[i].item() - inputs["behaviour_logprobs"][b, i].item()) for i in places}
        is_kept = all(weight >= veto for weight in token_weights.values())
        vetoed += not is_kept
        for i in places:
            weight = math.prod(token_weights.values()) if level == "sequence" else token_weights[i]
            ratio = (token_log_p[i] - inputs["logprobs"][b, i]).exp()
            advantage = float(ADVANTAGES[b])
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
            gain = torch.maximum(gain, torch.tensor(dual * advantage)) if advantage < 0 else gain
            total = total - is_kept * min(weight, cap) / ratio.item() * gain
            weights.append(weight)
            used.append(is_kept * min(weight, cap))
    (gradient,) = torch.autograd.grad(total, logits)
    count = len(weights)
    metrics = {
        "policy/weight": math.fsum(weights) / count,
        "policy/weight_max": max(weights),
        "policy/effective_share": math.fsum(used) ** 2 / (count * math.fsum(x * x for x in used)),
    }
    metrics |= {"policy/truncated_fraction": sum(w > cap for w in weights) / count} if cap < math.inf else {}
    metrics |= {"policy/vetoed_fraction": vetoed / 2} if veto else {}
    return total.item(), gradient, metrics


def run(inputs: dict[str, Tensor], advantages: Tensor = ADVANTAGES, **options):
    arguments = {name: value for name, value in inputs.items() if name != "logits"}
    logits = inputs["logits"].detach().requires_grad_()
    out = grpo(logits, **arguments, advantages=advantages, **options)
    return out, torch.autograd.grad(out.loss, logits)[0]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_weights_by_loops(options):
    """Bugs: truncation, the product over a sequence, the veto, or one of their metrics."""
    inputs = batch()
    total, expected_gradient, expected = by_loops(
        inputs, **{name.removeprefix("importance_"): x for name, x in options.items()}
    )
    out, gradient = run(inputs, **options, normalizer=4, chunk_size=2)
    assert out.loss.item() == pytest.approx(total / 4, rel=1e-11)
    torch.testing.assert_close(gradient, expected_gradient / 4, rtol=1e-10, atol=1e-14)
    metrics = {name: out.metrics[name].value() for name in expected}
    assert metrics == pytest.approx(expected, rel=1e-11)
    if "importance_veto" in options:
        assert 0 < expected["policy/vetoed_fraction"] < 1
    if "importance_cap" in options:
        assert expected["policy/truncated_fraction"] > 0


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_weights_do_not_depend_on_how_a_batch_is_cut(options):
    """Microbatches and padding; a vetoed sequence stays in the divisor. Bug: a rate per microbatch."""
    inputs = batch()
    out, gradient = run(inputs, **options, normalizer=6)
    parts = [
        run({name: x[[b]] for name, x in inputs.items()}, ADVANTAGES[[b]], **options, normalizer=6) for b in range(3)
    ]
    padded = {name: torch.nn.functional.pad(x, (0, 2)) for name, x in inputs.items() if name != "logits"}
    padded["logits"] = torch.nn.functional.pad(inputs["logits"], (0, 0, 0, 2), value=5.0)
    wide, wide_gradient = run(padded, **options, normalizer=6)
    for loss, other_gradient in (
        (sum(part.loss for part, _ in parts), torch.cat([part_gradient for _, part_gradient in parts])),
        (wide.loss, wide_gradient[:, :5]),
    ):
        torch.testing.assert_close(loss, out.loss, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-12, atol=1e-15)
    for name, metric in out.metrics.items():
        pooled = parts[0][0].metrics[name]
        for part, _ in parts[1:]:
            pooled = pooled.merge(part.metrics[name])
        assert pooled.value() == pytest.approx(metric.value(), rel=1e-12, abs=1e-15)


def test_a_fresh_student_is_not_clipped_however_it_was_sampled():
    """Bug: a clip that sees the temperature; at 0.5 nearly all ratios to the behaviour lie outside of 0.8 to 1.2."""
    inputs = batch()
    log_p = inputs["logits"].log_softmax(-1)
    inputs["logprobs"][:, 1:] = log_p[:, :-1].gather(2, inputs["ids"][:, 1:, None]).squeeze(2)
    out, _ = run(inputs)
    assert out.metrics["policy/clip_fraction"].value() == 0
    assert out.metrics["policy/ratio"].value() == pytest.approx(1, rel=1e-12)
    assert out.metrics["policy/weight_max"].value() > 1.2


def test_without_warping_nothing_changes():
    """To the bit. Bug: a result that differs if the engine reports both log-probabilities, although they are equal."""
    inputs = batch()
    del inputs["behaviour_logprobs"]
    plain, plain_gradient = run(inputs)
    out, gradient = run(inputs | {"behaviour_logprobs": inputs["logprobs"].clone()})
    assert torch.equal(out.loss, plain.loss)
    assert torch.equal(gradient, plain_gradient)


def test_truncated_or_dropped_samples_do_not_look_like_agreement():
    """Bug: a metric `kd` of 0 because every sequence was dropped."""
    inputs = batch()
    logits, teacher = inputs.pop("logits"), random_logits(3, 5, 7, 9, 1.0)
    plain, dropped = (
        sampled_kl(logits, teacher, **inputs, importance_cap=0.1, importance_veto=veto).metrics
        for veto in (None, 0.999)
    )
    assert dropped["policy/vetoed_fraction"].value() > 0
    assert (
        dropped["kd"].value() == plain["kd"].value() == sampled_kl(logits, teacher, **inputs).metrics["kd"].value() > 0
    )


def test_the_effective_share_is_of_all_that_is_merged():
    """Bug: a mean of the parts' shares."""
    weights = [[1.0, 3.0], [2.0], []]
    merged = EffectiveShare(0.0, 0.0, 0)
    for part in weights:
        merged = merged.merge(EffectiveShare(sum(part), sum(x * x for x in part), len(part)))
    assert merged.value() == pytest.approx(36 / (3 * 14))
    assert EffectiveShare(0.0, 0.0, 0).value() == 0
