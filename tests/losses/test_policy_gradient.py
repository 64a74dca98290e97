"""GRPO's loss: the four cases of clipping, a loop, and how a batch is cut."""

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
    """A token that has already moved as far as it may gets no gradient; one that has moved the wrong way does."""
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64).requires_grad_()
    found = Clip(0.2, 0.28, 3.0)(log_ratio, torch.tensor([advantage], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(found.loss.sum(), log_ratio)
    assert (-found.loss.item(), -gradient.item()) == (pytest.approx(gain, rel=1e-14), pytest.approx(slope, rel=1e-14))
    assert found.is_clipped.item() == (slope == 0)


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.arange(15).view(3, 5) % 7
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 1, 0], [0, 1, 0, 0, 0]])
    logits = random_logits(3, 5, 9, seed, 1.0)
    logprobs = torch.zeros(3, 5, dtype=torch.float64)
    logprobs[:, 1:] = logits[:, :-1, :7].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    logprobs += random_logits(1, 3, 5, seed + 1, 1.0)[0]
    advantages = torch.tensor([1.0, -0.5, 0.0], dtype=torch.float64)
    return {"logits": logits, "ids": ids, "mask": mask, "logprobs": logprobs, "advantages": advantages}


def run(given: dict[str, torch.Tensor], **options):
    arguments = {name: value for name, value in given.items() if name != "logits"}
    logits = given["logits"].detach().requires_grad_()
    out = grpo(logits, **arguments, vocab_size=7, **options)
    return out, torch.autograd.grad(out.loss, logits)[0]


def test_value_equals_the_loop():
    """Bugs: the shift, a mean by sequence, padded columns in the softmax, log-probabilities of another token."""
    given, total, ratios, clipped = batch(), 0.0, [], 0
    for b in range(3):
        for i in range(1, 5):
            if given["mask"][b, i]:
                row = given["logits"][b, i - 1, :7].tolist()
                own = row[int(given["ids"][b, i])] - math.log(math.fsum(math.exp(z) for z in row))
                ratio, advantage = math.exp(own - float(given["logprobs"][b, i])), float(given["advantages"][b])
                gain = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
                total -= gain
                clipped += gain != ratio * advantage
                ratios.append(ratio)
    out, _ = run(given, chunk_size=2)
    assert out.loss.item() == pytest.approx(total / 7, rel=1e-12)
    assert out.metrics["policy/loss"].value() == pytest.approx(total / 7, rel=1e-12)
    assert out.metrics["policy/ratio"].value() == pytest.approx(math.fsum(ratios) / 7, rel=1e-12)
    assert out.metrics["policy/ratio"].count == 7
    assert out.metrics["policy/clip_fraction"].value() == clipped / 7 > 0


def test_at_the_model_that_sampled_it_is_the_plain_policy_gradient():
    given = batch()
    logits = given["logits"]
    own = logits[:, :-1, :7].log_softmax(-1).gather(2, given["ids"][:, 1:, None]).squeeze(2)
    given["logprobs"][:, 1:] = own
    out, gradient = run(given)
    leaf = logits.detach().requires_grad_()
    log_p = leaf[:, :-1, :7].log_softmax(-1).gather(2, given["ids"][:, 1:, None]).squeeze(2)
    expected = -(log_p * given["advantages"][:, None] * given["mask"][:, 1:]).sum() / 7
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, leaf)[0], rtol=1e-11, atol=1e-15)
    assert out.metrics["policy/clip_fraction"].value() == 0


def test_from_hidden_states_and_with_far_off_engines():
    """fp32 logits of ±150 and log-probabilities of an engine that has nothing to do with them: finite."""
    given = batch()
    hidden, weight = random_logits(3, 5, 4, 5, 1.0), random_logits(1, 9, 4, 6, 1.0)[0]
    arguments = {name: value for name, value in given.items() if name != "logits"}
    from_head, plain = (
        grpo(logits, **arguments, vocab_size=7).loss
        for logits in (HeadLogits(hidden, Head(weight)), hidden @ weight.t())
    )
    torch.testing.assert_close(from_head, plain, rtol=1e-12, atol=0)
    given["logits"] = 150 * given["logits"].sign().float()
    given["logprobs"] = torch.full((3, 5), -500.0)
    out, gradient = run(given)
    assert out.loss.isfinite()
    assert gradient.isfinite().all()


def test_saves_the_gradient_and_nothing_else():
    options = {"ids": IDS, "mask": MASK, "logprobs": torch.full((B, S), -6.0), "advantages": torch.ones(B)}
    assert bytes_saved(lambda student, teacher: grpo(student, **options, clip_high=1e9).loss) <= 1.1


def test_nothing_sampled_stays_connected_and_shapes_are_named():
    given = batch()
    out, gradient = run(given | {"mask": torch.zeros(3, 5)})
    assert (out.loss.item(), gradient.any().item(), out.metrics["policy/clip_fraction"].value()) == (0, False, 0)
    with pytest.raises(ConfigError, match="advantages has shape"):
        run(given | {"advantages": torch.zeros(2)})
    with pytest.raises(ConfigError, match="logprobs has shape"):
        run(given | {"logprobs": torch.zeros(3, 4)})
