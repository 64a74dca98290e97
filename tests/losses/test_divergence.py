import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_opd.config.loss import DivergenceKind
from nemo_opd.errors import ConfigError
from nemo_opd.losses import p_kl, same_vocab
from nemo_opd.losses.divergence import DIVERGENCES, Cells, Divergence, DivergenceForm
from tests.reference import losses as reference

from . import cases
from .cases import KINDS

logit = st.floats(-20, 20)


def pair(seed: int = 0, units: int = 3, cells: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(3 * torch.randn(units, cells, generator=generator, dtype=torch.float64) for _ in range(2))


def by_reference(log_t: torch.Tensor, log_s: torch.Tensor, kind: str, **weights: float) -> torch.Tensor:
    return reference.divergence({"divergence": kind, "beta": 0.5, "mixed_weight": 0.5, **weights}, log_t, log_s)


@pytest.mark.parametrize(("kind", "weights"), KINDS)
def test_value_equals_the_definition(kind, weights):
    """Bugs: a swapped direction, a β on the wrong side, a forgotten ½."""
    z_t, z_s = pair()
    value = Divergence(kind, **weights)(z_t.log_softmax(-1), z_s.log_softmax(-1))
    sides = zip(z_t.log_softmax(-1), z_s.log_softmax(-1), strict=True)
    expected = torch.stack([by_reference(*side, kind, **weights) for side in sides])
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("kind", "weights"), KINDS)
def test_gradient_fits_the_value(kind, weights):
    """Closed forms of the gradient. Bug: one that is right only for a normalised log s."""
    z_t, z_s = pair(1)
    log_t = z_t.log_softmax(-1)
    divergence = Divergence(kind, **weights)
    assert torch.autograd.gradcheck(lambda z: divergence(log_t, z.log_softmax(-1)), z_s.requires_grad_())
    assert torch.autograd.gradcheck(
        lambda log_s: divergence(log_t, log_s), z_s.detach().log_softmax(-1).requires_grad_()
    )


def test_jsd_ends_are_the_two_kls():
    """Bug: 0 · inf at β = 0 or 1, or the two ends swapped."""
    log_t, log_s = (z.log_softmax(-1) for z in pair(2))
    assert torch.equal(Divergence("jsd", beta=0)(log_t, log_s), Divergence()(log_t, log_s))
    assert torch.equal(Divergence("jsd", beta=1)(log_t, log_s), Divergence("reverse_kl")(log_t, log_s))


def test_mixed_with_weight_one_is_finite_if_the_reverse_is_not():
    """Bug: 0 · inf is NaN."""
    log_t, log_s = torch.tensor([[0.0, -math.inf]]), torch.tensor([[0.5, 0.5]]).log()
    assert torch.equal(Divergence("mixed", mixed_weight=1)(log_t, log_s), Divergence()(log_t, log_s))


@pytest.mark.parametrize(("kind", "weights"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_distributions_give_exactly_zero(kind, weights, dtype):
    """Bug: rounding of log m, or of Σt ≠ 1, pulls at a student that is already right."""
    z = (20 * torch.randn(4, 1000, generator=torch.Generator().manual_seed(3))).to(dtype).requires_grad_()
    value = Divergence(kind, **weights)(z.detach().log_softmax(-1), z.log_softmax(-1))
    value.sum().backward()
    assert not value.any()
    assert not z.grad.any()


@pytest.mark.parametrize(("kind", "weights"), KINDS)
def test_cells_empty_on_both_sides_count_nothing(kind, weights):
    """Bug: −inf − −inf and 0 · −inf are NaN."""
    z_t, z_s = pair(4)
    empty = torch.full((3, 2), -math.inf, dtype=torch.float64)
    divergence = Divergence(kind, **weights)
    padded = torch.cat([z_s, empty], -1).requires_grad_()
    value = divergence(torch.cat([z_t, empty], -1).log_softmax(-1), padded.log_softmax(-1))
    torch.testing.assert_close(value, divergence(z_t.log_softmax(-1), z_s.log_softmax(-1)), rtol=1e-14, atol=0)
    (gradient,) = torch.autograd.grad(value.sum(), padded)
    assert gradient.isfinite().all()
    assert not gradient[:, -2:].any()


@pytest.mark.parametrize(("kind", "weights"), KINDS)
def test_a_cell_empty_on_only_the_teacher_side_is_finite(kind, weights):
    """Forward KL, JSD and TVD are finite; reverse KL is infinite by definition. Bug: 0 · log 0 is NaN."""
    log_t = torch.tensor([[0.0, -math.inf]])
    log_s = torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    value = Divergence(kind, **weights)(log_t, log_s)
    if kind in ("reverse_kl", "mixed"):
        assert value.item() == math.inf
    else:
        # e^−1000 is 0, and 0 · 1000 is a number.
        expected = by_reference(log_t[0].clamp(min=-1000), log_s.detach()[0], kind, **weights)
        assert value.item() == pytest.approx(expected.item(), rel=1e-6)
        (gradient,) = torch.autograd.grad(value, log_s)
        assert gradient.isfinite().all()


@settings(max_examples=60)
@given(
    logits=st.lists(st.tuples(logit, logit), min_size=2, max_size=8),
    kind=st.sampled_from(("forward_kl", "reverse_kl", "jsd", "mixed", "tvd")),
    share=st.floats(0, 1),
)
def test_not_negative(logits, kind, share):
    """Rounding of Σ over n cells of at most 40 nats each is the only way below zero."""
    log_t, log_s = torch.tensor(logits, dtype=torch.float64).t().log_softmax(-1)
    value = Divergence(kind, share, share)(log_t[None], log_s[None])
    assert value.item() >= -40 * len(logits) * torch.finfo(torch.float64).eps


@pytest.mark.parametrize(("kind", "weights"), KINDS)
def test_of_logits_equals_their_softmax(kind, weights):
    """Columns of −inf on both sides, and logits whose probabilities are 0 in fp64. Bug: NaN in value or gradient."""
    z_t, z_s = pair(7)
    z_t[:, 1] = z_s[:, 1] = -math.inf
    z_t[0, 0] += 800
    z_s[1, 2] += 800
    z_s.requires_grad_()
    divergence = Divergence(kind, **weights)
    value, expected = divergence.of_logits(z_t, z_s), divergence(z_t.log_softmax(-1), z_s.log_softmax(-1))
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
    gradient, expected_gradient = (torch.autograd.grad(side.sum(), z_s)[0] for side in (value, expected))
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "mixed"])
def test_of_logits_keeps_the_digits_of_a_small_divergence(kind):
    """Logits are 2^−10 apart, as in a student that is nearly right; the divergence is near 2^−21 nat.

    Bug: a log Σ exp near 10 that is rounded to fp32 shifts every cell alike, by up to 2^−21. The rounding of
    exponentials differs between cells, and an eighth of that bound is room for their sum.
    """
    generator = torch.Generator().manual_seed(8)
    z_t = 3 * torch.randn(8, 4096, generator=generator)
    z_s = z_t + 2**-10 * torch.randn(8, 4096, generator=generator)
    value = Divergence(kind).of_logits(z_t, z_s)
    exact = Divergence(kind).of_logits(z_t.double(), z_s.double())
    torch.testing.assert_close(value.double(), exact, rtol=0, atol=2**-24)


@pytest.mark.parametrize("side", ["teacher", "student"])
@pytest.mark.parametrize(("kind", "weights"), KINDS)
def test_a_nan_is_not_hidden(kind, weights, side):
    """Bug: guards against 0 · inf make a broken model's loss finite."""
    z_t, z_s = pair(9)
    (z_t if side == "teacher" else z_s)[0, 0] = math.nan
    divergence = Divergence(kind, **weights)
    for value in (divergence.of_logits(z_t, z_s), divergence(z_t.log_softmax(-1), z_s.log_softmax(-1))):
        assert value[0].isnan()
        assert value[1:].isfinite().all()


def test_low_precision_is_computed_in_fp32():
    """Bug: a divergence in bf16."""
    log_t, log_s = (z.log_softmax(-1).bfloat16() for z in pair(5))
    assert Divergence()(log_t, log_s).dtype == torch.float32


@pytest.mark.parametrize("wrong", [{"kind": "kl"}, {"kind": "jsd", "beta": 1.5}, {"kind": "mixed", "mixed_weight": -1}])
def test_wrong_choices_are_named(wrong):
    value = next(reversed(wrong.values()))
    with pytest.raises(ConfigError, match=str(value)):
        Divergence(**wrong)


def test_every_divergence_has_a_setting_and_an_oracle():
    """Bug: a divergence that no config can choose, or that these tests skip."""
    assert DIVERGENCES.keys() == set(get_args(DivergenceKind)) == {kind for kind, _ in KINDS}


def hellinger(divergence: Divergence, cells: Cells) -> tuple[torch.Tensor, torch.Tensor]:
    common = (cells.t * cells.s).sqrt()
    return ((cells.t + cells.s) / 2 - common).sum(-1), (cells.s - common) / 2


@pytest.mark.parametrize("loss", [same_vocab, p_kl])
def test_a_divergence_unknown_to_kernels_runs_in_pytorch(loss, monkeypatch):
    """Bug: kernels compute another divergence in its place."""
    (case,) = (case for case in cases.LOSSES if case.name == loss.__name__)
    batch = case.batch().to(torch.float32)
    arguments = case.arguments(batch)

    def is_for_kernels(kind: str) -> list[bool]:
        terms = loss.plan(batch.student, batch.teacher, **arguments, divergence=kind).terms
        return [term.row_loss is not None for term in terms]

    monkeypatch.setitem(DIVERGENCES, "hellinger", DivergenceForm(hellinger))
    assert any(is_for_kernels("tvd"))
    assert not any(is_for_kernels("hellinger"))
