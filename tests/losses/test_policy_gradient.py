"""GRPO's loss: the cases of clipping, a loop, and how a batch is cut."""

import math

import pytest
import torch

from nemo_opd.errors import ConfigError
from nemo_opd.logits import Head, HeadLogits
from nemo_opd.losses import grpo
from nemo_opd.losses.importance import Clip

from .cases import random_logits
from .test_memory import IDS, MASK, B, S, bytes_saved


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "slope"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.5, 2.0, 1.28 * 2, 0.0),
        (0.5, 2.0, 0.5 * 2, 0.5 * 2),
        (0.5, -2.0, 0.8 * -2, 0.0),
        (1.5, -2.0, 1.5 * -2, 1.5 * -2),
        (9.0, -2.0, 3.0 * -2, 0.0),
    ],
)
def test_clipping(ratio, advantage, gain, slope):
    """Bug: a gradient for a token that has moved far enough, or none for one that moved the wrong way."""
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64).requires_grad_()
    result = Clip(0.2, 0.28, 3.0)(log_ratio, torch.tensor([advantage], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_ratio)
    assert (-result.loss.item(), -gradient.item()) == (pytest.approx(gain, rel=1e-14), pytest.approx(slope, rel=1e-14))
    assert result.is_clipped.item() == (slope == 0)


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.arange(15).view(3, 5) % 7
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 1, 0], [0, 1, 0, 0, 0]])
    logits = random_logits(3, 5, 9, seed, 1.0)
    logprobs = torch.zeros(3, 5, dtype=torch.float64)
    logprobs[:, 1:] = logits[:, :-1, :7].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    logprobs += random_logits(1, 3, 5, seed + 1, 1.0)[0]
    advantages = torch.tensor([1.0, -0.5, 0.0], dtype=torch.float64)
    return {"logits": logits, "ids": ids, "mask": mask, "logprobs": logprobs, "advantages": advantages}


def run(inputs: dict[str, torch.Tensor], **options):
    arguments = {name: value for name, value in inputs.items() if name != "logits"}
    logits = inputs["logits"].detach().requires_grad_()
    out = grpo(logits, **arguments, vocab_size=7, **options)
    return out, torch.autograd.grad(out.loss, logits)[0]


def test_value_equals_the_loop():
    """Bugs: the shift, a mean per sequence, padding columns in the softmax, log-probabilities of another token."""
    inputs, total, ratios, clipped = batch(), 0.0, [], 0
    for b in range(3):
        for i in range(1, 5):
            if inputs["mask"][b, i]:
                row = inputs["logits"][b, i - 1, :7].tolist()
                log_p = row[int(inputs["ids"][b, i])] - math.log(math.fsum(math.exp(z) for z in row))
                ratio, advantage = math.exp(log_p - float(inputs["logprobs"][b, i])), float(inputs["advantages"][b])
                gain = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
                total -= gain
                clipped += gain != ratio * advantage
                ratios.append(ratio)
    out, _ = run(inputs, chunk_size=2)
    assert out.loss.item() == pytest.approx(total / 7, rel=1e-12)
    assert out.metrics["policy/loss"].value() == pytest.approx(total / 7, rel=1e-12)
    assert out.metrics["policy/ratio"].value() == pytest.approx(math.fsum(ratios) / 7, rel=1e-12)
    assert out.metrics["policy/ratio"].count == 7
    assert out.metrics["policy/clip_fraction"].value() == clipped / 7 > 0


def test_at_the_model_that_sampled_it_is_the_plain_policy_gradient():
    """Bug: a ratio that is differentiated twice, or not at all."""
    inputs = batch()
    logits = inputs["logits"]
    logprobs = logits[:, :-1, :7].log_softmax(-1).gather(2, inputs["ids"][:, 1:, None]).squeeze(2)
    inputs["logprobs"][:, 1:] = logprobs
    out, gradient = run(inputs)
    leaf = logits.detach().requires_grad_()
    log_p = leaf[:, :-1, :7].log_softmax(-1).gather(2, inputs["ids"][:, 1:, None]).squeeze(2)
    expected = -(log_p * inputs["advantages"][:, None] * inputs["mask"][:, 1:]).sum() / 7
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, leaf)[0], rtol=1e-11, atol=1e-15)
    assert out.metrics["policy/clip_fraction"].value() == 0


def test_from_hidden_states_and_with_far_off_engines():
    """fp32 logits of ±150 and unrelated log-probabilities of the engine. Bug: an infinite ratio."""
    inputs = batch()
    hidden, weight = random_logits(3, 5, 4, 5, 1.0), random_logits(1, 9, 4, 6, 1.0)[0]
    arguments = {name: value for name, value in inputs.items() if name != "logits"}
    from_head, plain = (
        grpo(logits, **arguments, vocab_size=7).loss
        for logits in (HeadLogits(hidden, Head(weight)), hidden @ weight.t())
    )
    torch.testing.assert_close(from_head, plain, rtol=1e-12, atol=0)
    inputs["logits"] = 150 * inputs["logits"].sign().float()
    inputs["logprobs"] = torch.full((3, 5), -500.0)
    out, gradient = run(inputs)
    assert out.loss.isfinite()
    assert gradient.isfinite().all()


def test_saves_the_gradient_and_nothing_else():
    """Bug: a softmax kept for backward."""
    options = {"ids": IDS, "mask": MASK, "logprobs": torch.full((B, S), -6.0), "advantages": torch.ones(B)}
    assert bytes_saved(lambda student, teacher: grpo(student, **options, clip_high=1e9).loss) <= 1.1


def test_nothing_sampled_stays_connected_and_shapes_are_named():
    """Bug: a rank without sampled tokens skips the backward collectives."""
    inputs = batch()
    out, gradient = run(inputs | {"mask": torch.zeros(3, 5)})
    assert (out.loss.item(), gradient.any().item(), out.metrics["policy/clip_fraction"].value()) == (0, False, 0)
    with pytest.raises(ConfigError, match="advantages has shape"):
        run(inputs | {"advantages": torch.zeros(2)})
    with pytest.raises(ConfigError, match="logprobs has shape"):
        run(inputs | {"logprobs": torch.zeros(3, 4)})
