import pytest
import torch

from nemo_opd.losses import cross_entropy
from tests.reference.losses import likelihood, predicted

MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 1]])
IDS = torch.tensor([[0, 3, 9, 2], [4, 0, 1, 4]])


def logits(dtype=torch.float64) -> torch.Tensor:
    return (3 * torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).to(dtype)


def test_value_equals_the_loop():
    """Bugs: unshifted logits, a head that is not cut to 5 columns, a lookup of ids that are not scored."""
    z = logits()
    expected = 0.0
    for b in range(2):
        for i in range(1, 4):
            if MASK[b, i]:
                expected -= likelihood(*predicted(z[b, :, :5], IDS[b].tolist(), [i])).item()
    out = cross_entropy(z, IDS, mask=MASK, vocab_size=5, chunk_size=2)
    assert out.loss.item() == pytest.approx(expected / 3, rel=1e-12)
    assert out.metrics["ce"].value() == pytest.approx(expected / 3, rel=1e-12)
    divided = cross_entropy(z, IDS, mask=MASK, vocab_size=5, normalizer=12)
    assert divided.loss.item() == pytest.approx(expected / 12, rel=1e-12)
    assert divided.metrics["ce"].value() == pytest.approx(expected / 3, rel=1e-12)


def test_gradient():
    assert torch.autograd.gradcheck(
        lambda z: cross_entropy(z, IDS, mask=MASK, vocab_size=5, chunk_size=2).loss, logits().requires_grad_()
    )


def test_all_masked_stays_connected():
    """Bug: a rank without scored tokens skips the backward collectives."""
    z = logits(torch.bfloat16).requires_grad_()
    loss = cross_entropy(z, IDS, mask=torch.zeros_like(MASK)).loss
    loss.backward()
    assert loss.item() == 0
    assert not z.grad.any()
