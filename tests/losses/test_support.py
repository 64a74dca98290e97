import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_opd.errors import ConfigError
from nemo_opd.losses.divergence import Divergence
from nemo_opd.losses.support import Columns, Support, largest, with_rest
from tests.reference import losses as reference

from .cases import KINDS

SUPPORTS, NORMALIZATIONS = ("teacher_topk", "student_topk", "union"), ("full", "support", "rest")
GRID = tuple(itertools.product(KINDS, SUPPORTS, NORMALIZATIONS))
grid = pytest.mark.parametrize(("kind", "support", "normalization"), GRID)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_support = pytest.mark.parametrize("support", SUPPORTS)


def pair(seed: int = 0, units: int = 5, width: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of teacher and student that share some of their largest columns."""
    generator = torch.Generator().manual_seed(seed)
    teacher, noise = (2 * torch.randn(units, width, generator=generator, dtype=torch.float64) for _ in range(2))
    return teacher, 0.5 * teacher + noise


def divergence_of(kind) -> Divergence:
    name, weights = kind
    return Divergence(name, **weights)


@grid
@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_value_equals_the_loop(kind, support, normalization, top_k):
    """Bugs: a column counted twice in a union, a rest cell from the wrong side, a sum over the wrong columns."""
    if top_k == 1 and normalization == "support" and support != "union":
        pytest.skip("it is constant, and refused")
    teacher, student = pair()
    value = Support(support, top_k, normalization).compare(divergence_of(kind), teacher, student)
    term = {"divergence": kind[0], "beta": 0.5, "mixed_weight": 0.5, **kind[1]}
    term |= {"support": support, "top_k": top_k, "normalization": normalization}
    expected = [
        reference.same_vocab(term, {}, *sides)
        for sides in zip(teacher.log_softmax(1), student.log_softmax(1), strict=True)
    ]
    torch.testing.assert_close(value, torch.stack(expected), rtol=1e-12, atol=1e-14)


@grid
def test_gradient_fits_the_value(kind, support, normalization):
    """Bug: no gradient through rest cells, or one through the choice of columns."""
    teacher, student = pair(1)
    compare = Support(support, 3, normalization).compare
    assert torch.autograd.gradcheck(lambda z: compare(divergence_of(kind), teacher, z), student.requires_grad_())


@every_kind
@every_support
@pytest.mark.parametrize("normalization", ["support", "rest"])
@pytest.mark.parametrize(("dtype", "top_k"), [(torch.float32, 5), (torch.float64, 40), (torch.float32, 99)])
def test_equal_sides_give_exactly_zero(kind, support, normalization, dtype, top_k):
    """Bug: rounding noise, above all in a rest cell's gradient, pulls at a student that is already right."""
    teacher = (20 * torch.randn(4, 100, generator=torch.Generator().manual_seed(3))).to(dtype)
    student = teacher.clone().requires_grad_()
    value = Support(support, top_k, normalization).compare(divergence_of(kind), teacher, student)
    value.sum().backward()
    assert not value.any()
    assert not student.grad.any()


@every_support
@every_kind
def test_parity_form_is_zero_for_equal_sides(kind, support):
    """Its gradient for equal sides is the formula's and not zero; that is why it is for parity only."""
    teacher, _ = pair(2)
    value = Support(support, 3, "full").compare(divergence_of(kind), teacher, teacher.clone())
    assert not value.any()


@every_support
@pytest.mark.parametrize(("beta", "end"), [(0.0, "forward_kl"), (1.0, "reverse_kl")])
def test_parity_form_of_the_ends_of_jsd(support, beta, end):
    """Bug: jsd with β = 0 or 1 lacks the correction of the KL that it equals."""
    teacher, student = pair(5)
    columns = Support(support, 3, "full")
    assert torch.equal(
        columns.compare(Divergence("jsd", beta=beta), teacher, student),
        columns.compare(Divergence(end), teacher, student),
    )


def test_parity_form_of_forward_kl_is_the_sum_that_other_systems_take():
    """Bug: the generalised KL, with Σ(s − t), which is never negative. The plain sum is negative if the student has
    more mass in the support.
    """
    teacher, student = torch.tensor([[1.0, 0.0, 0.9]]), torch.tensor([[3.0, 0.0, 0.0]]).requires_grad_()
    value = Support("teacher_topk", 1, "full").compare(Divergence(), teacher, student)
    log_q, log_p = teacher.log_softmax(-1), student.log_softmax(-1)
    torch.testing.assert_close(value, (log_q.exp() * (log_q - log_p))[:, 0])
    assert value.item() < 0


@grid
def test_every_column_is_the_full_divergence(kind, support, normalization):
    """To the bit. Bug: an empty rest cell, or normalising twice."""
    teacher, student = pair(3)
    full = Support().compare(divergence_of(kind), teacher, student)
    assert torch.equal(Support("full", None, normalization).compare(divergence_of(kind), teacher, student), full)
    for top_k in (7, 8):
        assert torch.equal(Support(support, top_k, normalization).compare(divergence_of(kind), teacher, student), full)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(KINDS),
    support=st.sampled_from(SUPPORTS),
    top_k=st.integers(1, 11),
    scale=st.floats(0.1, 8),
)
def test_with_the_rest_cell_from_zero_to_the_full_divergence(seed, kind, support, top_k, scale):
    """Data processing inequality. Twelve cells of at most 160 nats, each rounded to 2^−52 of its size."""
    teacher, student = (scale * z for z in pair(seed, 3, 12))
    value = Support(support, top_k, "rest").compare(divergence_of(kind), teacher, student)
    full = Support().compare(divergence_of(kind), teacher, student)
    tolerance = 12 * 160 * 2**-52
    assert (value >= -tolerance).all()
    assert (value <= full + tolerance).all()


@grid
def test_extreme_logits_are_finite(kind, support, normalization):
    """Bug: a rest cell with e^−300 of the mass, which is 0 in fp32."""
    teacher = torch.tensor([[150.0, 150.0, -150.0, 0.0, -150.0], [-150.0, 150.0, 150.0, 0.0, -150.0]])
    for student in (-teacher, teacher.flip(-1), teacher.clone()):
        student.requires_grad_()
        value = Support(support, 2, normalization).compare(divergence_of(kind), teacher, student)
        value.sum().backward()
        assert value.isfinite().all()
        assert student.grad.isfinite().all()


@every_kind
def test_a_union_that_takes_every_column_of_some_rows_only(kind):
    """Bug: their rest cell is empty on both sides; −inf − −inf and its gradient are NaN."""
    teacher = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]] * 2, dtype=torch.float64)
    # No cell is equally likely on both sides, because total variation has no derivative there.
    student = torch.tensor([[0.0, 1.0, 2.5, 3.0, 4.0], [2.0, 3.0, 4.0, 0.0, 1.0]], dtype=torch.float64).requires_grad_()
    value = Support("union", 3, "rest").compare(divergence_of(kind), teacher, student)
    full = Support().compare(divergence_of(kind), teacher, student)
    (gradient,) = torch.autograd.grad(value.sum(), student, retain_graph=True)
    (full_gradient,) = torch.autograd.grad(full.sum(), student)
    torch.testing.assert_close(value[0], full[0], rtol=1e-14, atol=0)
    torch.testing.assert_close(gradient[0], full_gradient[0], rtol=1e-13, atol=1e-16)
    assert value[1] < full[1]
    assert gradient.isfinite().all()


def test_a_small_rest_keeps_its_digits():
    """Bug: 1 − Σ of the support's probabilities, which is 0 in fp32. log p near −30 is rounded to 2^−24 of its size."""
    log_p = torch.tensor([[30.0, 0.0, -1.0, 1.0]]).log_softmax(-1)
    log_rest = Columns(torch.tensor([[0]])).cells(log_p)[:, 1:]
    exact = math.log(math.fsum((1, math.exp(-1), math.exp(1)))) - 30
    assert log_rest.item() == pytest.approx(exact, rel=4 * 2**-24)


def test_a_rest_that_only_one_side_can_have_is_dropped():
    """Bug: a rest cell on one side makes KL infinite."""
    log_t, log_s = (z.log_softmax(-1) for z in pair(4))
    short = log_t[:, :4]
    cells_t, cells_s = with_rest(
        short, log_s[:, :4].log_softmax(-1), Columns(torch.arange(4).expand(5, 4)).cells(log_t)[:, 4:], None
    )
    for cells in (cells_t, cells_s):
        torch.testing.assert_close(cells.exp().sum(-1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(cells_t, short.log_softmax(-1))


@pytest.mark.parametrize(("width", "top_k"), [(3001, 5), (4096, 16), (4103, 60), (640, 39), (640, 41)])
def test_the_largest_columns_equal_a_search_through_the_row(width, top_k):
    """Bugs: columns in no group at any level, several in one group, and forbidden columns of −inf."""
    logits = torch.randn(4, width, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    logits[:, -1], logits[:, width // 3 : width // 3 + 3] = 9.0, torch.tensor([7.0, -torch.inf, 8.0]).double()
    logits[1] = logits[1].sort().values
    columns = largest(logits, top_k)
    assert torch.equal(columns.sort(-1).values, logits.topk(top_k).indices.sort(-1).values)


def test_the_rest_of_forbidden_columns_has_no_gradient():
    """Bug: all columns outside of the support are −inf, and their sum's gradient is NaN."""
    logits = torch.tensor([[1.0, 2.0, -math.inf, -math.inf]], requires_grad=True)
    cells = Columns(torch.tensor([[0, 1]])).cells(logits)
    probabilities = cells.softmax(-1)
    torch.testing.assert_close(probabilities[0, :2], logits.detach()[0, :2].softmax(-1))
    assert probabilities[0, 2] == 0
    (gradient,) = torch.autograd.grad(probabilities[0, 0], logits)
    assert gradient.isfinite().all()
    assert not gradient[0, 2:].any()


def test_zero_units_have_zero_values():
    """Bug: a reduction over zero rows fails."""
    for columns in (Support(), Support("union", 2, "rest"), Support("teacher_topk", 2, "full")):
        student = torch.zeros(0, 500, requires_grad=True)
        value = columns.compare(Divergence(), torch.zeros(0, 500), student)
        assert value.shape == (0,)
        assert torch.autograd.grad(value.sum(), student)[0].shape == (0, 500)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("topk",), "support='topk'"),
        (("full", None, "none"), "normalization='none'"),
        (("union",), "support=union needs top_k"),
        (("full", 3), "top_k=3: support=full takes every column"),
        (("teacher_topk", 0), "top_k=0"),
    ],
)
def test_impossible_choices_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Support(*arguments)
