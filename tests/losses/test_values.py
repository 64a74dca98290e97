"""Losses and their gradients against tests/reference, and in cases with one right value."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from nemo_opd import losses
from nemo_opd.config.loss import (
    ALMTerm,
    BytePrefixTerm,
    GoldTerm,
    HKLTerm,
    LossTerm,
    PKLTerm,
    SameVocabTerm,
    SharedPrefixTerm,
    StrictTerm,
    TCADTerm,
    ULDTerm,
)
from nemo_opd.losses.term_loss import NOT_ARGUMENTS
from nemo_opd.projection import ProjectionMatrix

from .cases import (
    KINDS,
    LOSSES,
    PHI,
    STUDENT_CELLS,
    TEACHER,
    TEACHER_CELLS,
    Batch,
    Case,
    identity,
    one_tokenizer,
    pair,
    two_tokenizers,
)
from .plain import cost, narrowed

WITH_DIVERGENCE: list[tuple[type, dict[str, Any]]] = [
    (SameVocabTerm, {"temperature": 2.5}),
    (SameVocabTerm, {"support": "teacher_topk", "top_k": 2, "normalization": "rest", "temperature": 2.5}),
    (SameVocabTerm, {"support": "student_topk", "top_k": 3, "normalization": "support"}),
    (SameVocabTerm, {"support": "union", "top_k": 2, "normalization": "rest"}),
    (SameVocabTerm, {"support": "union", "top_k": 3, "normalization": "full", "temperature": 2.5}),
    (TCADTerm, {"support_size": 4, "coverage_coef": 0.6, "temperature": 1.7}),
    (TCADTerm, {"support_size": 4, "support": "union", "coverage_coef": 0.6, "temperature": 1.7}),
    (TCADTerm, {"support_size": 99, "coverage_coef": 0}),
    (PKLTerm, {"coverage_coef": 0.3, "temperature": 2.5}),
    (PKLTerm, {"vocab_topk": 1, "temperature": 1.6, "coverage_coef": 0.7}),
    (PKLTerm, {"vocab_topk": 4, "continuation_weight": 0.7}),
    (PKLTerm, {"merge": "mean", "temperature": 1.6, "coverage_coef": 0.7}),
    (PKLTerm, {"merge": "mean", "vocab_topk": 2}),
    *((term, {"continuation_weight": 0.7}) for term in (GoldTerm, HKLTerm)),
    *(
        (term, {"temperature": 2.5, "common_weight": 0.3, "uncommon_weight": 1.7, "uncommon_topk": 3})
        for term in (GoldTerm, HKLTerm)
    ),
    (GoldTerm, {"temperature": 0.8, "uncommon_weight": 0.0}),
    (GoldTerm, {"uncommon_topk": 1}),
    *((term, {"merge": "mean", "temperature": 1.6}) for term in (GoldTerm, HKLTerm)),
    (GoldTerm, {"merge": "observed", "temperature": 1.7}),
    *((StrictTerm, {"top_k": top_k, "temperature": 2.5}) for top_k in (None, 2, 9)),
    *((StrictTerm, {"top_k": top_k, "normalization": "rest", "continuation_weight": 0.7}) for top_k in (None, 2)),
    *((BytePrefixTerm, {"pieces": "longest_prefix", "temperature": tau}) for tau in (1.0, 2.5)),
    (BytePrefixTerm, {"continuation_weight": 0.7}),
    *((SharedPrefixTerm, {"temperature": tau, "continuation_weight": tau - 1}) for tau in (1.0, 2.5)),
]
WITHOUT: list[tuple[type, dict[str, Any]]] = [
    *((ALMTerm, {"temperature": tau}) for tau in (1.0, 2.5, 100.0)),
    *((ULDTerm, {"temperature": tau}) for tau in (1.0, 2.5)),
]


def run(term: LossTerm, batch: Batch, **more: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return loss, gradient and metric with these settings."""
    function = getattr(losses, term.type)
    case = Case(term.type, function, term.model_dump(exclude=NOT_ARGUMENTS) | more, term.type not in ("alm", "uld"))
    student = batch.student.detach().requires_grad_()
    out = case.run(batch.with_logits(student))
    return out.loss.detach(), torch.autograd.grad(out.loss, student)[0], out.metrics["kd"]


def check(term: LossTerm, batch: Batch) -> None:
    """Compare with the reference: as is, and in blocks with likely columns that are not tokens."""
    expected = cost(term, batch, TEACHER)
    assert expected.num_units > 1
    divisor = 2 if term.type == "tcad" else expected.num_units
    sizes = {"student_vocab_size": batch.student.shape[2], "teacher_vocab_size": batch.teacher.shape[2]}
    loss, gradient, kd = run(term, batch.widened(2, 3), chunk_size=2, **sizes)
    assert not gradient[..., -2:].any()
    assert kd.count == expected.num_units
    assert kd.value() == pytest.approx(expected.reported / expected.num_units, rel=1e-10)
    is_narrower = batch.student.shape[2] < batch.projection.student_vocab_size
    plain = run(term, batch, normalizer=7, **(sizes if is_narrower else {}))
    for value, slope, by in ((loss, gradient[..., :-2], divisor), (*plain[:2], 7)):
        assert value.item() == pytest.approx(expected.loss.item() / by, rel=1e-10)
        torch.testing.assert_close(slope, expected.gradient / by, rtol=1e-9, atol=1e-13)


def batch_of(term: LossTerm) -> Batch:
    """Make teacher logits that are much larger in rows the loss does not read."""
    if isinstance(term, SameVocabTerm | TCADTerm):
        return one_tokenizer(width=11)
    batch = two_tokenizers()
    if isinstance(term, StrictTerm):
        batch.student_ids[0, 1] = 1  # no pair with the teacher's
    is_read = batch.teacher_chunk_id >= 0
    if isinstance(term, PKLTerm) and term.merge != "mean" and not term.continuation_weight:
        is_read = is_read & (batch.teacher_chunk_id.diff(prepend=batch.teacher_chunk_id[:, :1]) != 0)
    unread = ~torch.nn.functional.pad(is_read[:, 1:], (0, 1))
    for b in range(2):
        batch.teacher[b, unread[b], b] += 50
    return batch


@pytest.mark.parametrize(("kind", "weights"), KINDS)
@pytest.mark.parametrize(("term", "settings"), WITH_DIVERGENCE, ids=str)
def test_with_every_divergence(term: type, settings: dict[str, Any], kind: str, weights: dict[str, float]) -> None:
    """Catches the predictor of another token, a temperature or τ² on one summand only, columns that are not tokens,
    wrong tokens in a rest cell, tail or normaliser, and a closed-form gradient of another value.
    """
    loss_term = term(**settings, divergence=kind, **weights)
    check(loss_term, batch_of(loss_term))


@pytest.mark.parametrize(("term", "settings"), WITHOUT, ids=str)
def test_without_a_divergence(term: type, settings: dict[str, Any]) -> None:
    """Catches the same for ALM and ULD."""
    loss_term = term(**settings)
    check(loss_term, batch_of(loss_term))
    if term is ULDTerm:
        check(loss_term, narrowed(two_tokenizers(), every_teacher_token()))


def every_student_token() -> ProjectionMatrix:
    """Five student tokens, all of them paired."""
    indices = 2 * np.arange(5)[:, None]
    return ProjectionMatrix(indices, np.ones((5, 1)), np.ones(5, bool), teacher_vocab_size=len(TEACHER))


def every_teacher_token() -> ProjectionMatrix:
    """Five teacher tokens, all of them paired."""
    indices = np.where(np.arange(9) % 2, -1, np.arange(9) // 2)[:, None]
    return ProjectionMatrix(indices, 1.0 * (indices >= 0), indices[:, 0] >= 0, teacher_vocab_size=5)


SHARED = {
    name: replace(pair(), **maps)
    for name, maps in (
        ("student", {"teacher_shared_prefix": [max(c, 0) for c in TEACHER_CELLS]}),
        ("teacher", {"student_shared_prefix": [max(c, 0) for c in STUDENT_CELLS]}),
    )
}
REACHED = (
    [0 if v < 0 else v for v in PHI],
    [4, 6, 7, 0, 2, 1, 3, 8, 5, 1, 1],
    [4, 6, 7, 0, 2, 1, 3, -1, 5, 1, 1],
)
"""No rest for the teacher; none for both; and a rest of the student with one token, which can be the realised one."""
ONE_SIDED = [
    *((GoldTerm(), make()) for make in (every_student_token, every_teacher_token)),
    *((StrictTerm(normalization="rest"), make()) for make in (every_student_token, every_teacher_token)),
    *((SharedPrefixTerm(), projection) for projection in SHARED.values()),
    *((BytePrefixTerm(pieces="longest_prefix"), replace(pair(), byte_prefix=phi)) for phi in REACHED),
]


@pytest.mark.parametrize(("kind", "weights"), KINDS)
@pytest.mark.parametrize(("term", "projection"), ONE_SIDED, ids=lambda value: getattr(value, "type", ""))
def test_a_rest_of_one_side_is_dropped(
    term: LossTerm, projection: ProjectionMatrix, kind: str, weights: dict[str, float]
) -> None:
    """Bug: the cell is kept, which is infinite for some divergence and direction."""
    batch = replace(two_tokenizers(), projection=projection)
    if len(projection.shared_pairs) == 5 and projection.student_shared_prefix is None:
        batch = narrowed(batch, projection)
    check(term.model_copy(update={"divergence": kind, **weights}), batch)


SPELLED = replace(
    pair(),
    student_shared_spelling=[0, 2, 1, 4, 4, 2, 3, 0, 4],
    teacher_shared_spelling=[3, 4, 1, 0, 2, -1, 0, 2, 4, 4, 3],
)


@pytest.mark.parametrize("pieces", ["spelling", "longest_prefix"])
def test_pieces_choose_the_maps(pieces: Any) -> None:
    """Bug: the maps of the other kind of pieces."""
    check(SharedPrefixTerm(pieces=pieces), replace(two_tokenizers(), projection=SPELLED))


def test_a_shared_token_beyond_a_smaller_vocabulary_is_not_a_cell() -> None:
    """Only the teacher's token 8 is in cell 4. Bug: the cell is kept, with probability 0."""
    batch = two_tokenizers()
    batch = batch.with_logits(batch.student, batch.teacher[..., :8])
    without = [-1 if cell == 4 else cell for cell in STUDENT_CELLS]
    never = batch.student.masked_fill(torch.tensor(STUDENT_CELLS) == 4, -1e4)
    maps = {"student_shared_prefix": without, "teacher_shared_prefix": [-1 if c == 4 else c for c in TEACHER_CELLS]}
    expected = replace(batch, student=never, projection=replace(pair(), **maps))
    values = [run(SharedPrefixTerm(), side, teacher_vocab_size=8)[0] for side in (batch, expected)]
    torch.testing.assert_close(*values, rtol=1e-12, atol=0)


@pytest.mark.parametrize("term", [PKLTerm(), GoldTerm(), HKLTerm()], ids=lambda term: term.type)
def test_a_given_size_drops_what_lies_beyond_it(term: LossTerm) -> None:
    """A head narrower than its tokenizer is the user's choice. Bug: an error, or entries beyond it that count as
    covered.
    """
    batch = two_tokenizers()
    check(term, batch.with_logits(batch.student[..., :7], batch.teacher[..., :8]))


@pytest.mark.parametrize("term", [PKLTerm, GoldTerm, HKLTerm, StrictTerm, SharedPrefixTerm, ULDTerm])
def test_extreme_logits_have_the_right_value(term: type) -> None:
    """Bug: a floor of ε, or 1 − Σ of the pairs, which has no digit left for a rest of e^−300."""
    batch = two_tokenizers()
    batch = batch.with_logits(150 * batch.student.sign(), 150 * batch.teacher.sign())
    pairs = pair().shared_pairs
    batch.student[:, 0], batch.teacher[:, 0] = -150, 0
    batch.student[:, 0, pairs[:, 0]] = 150
    expected = cost(term(), batch, TEACHER)
    loss, _, _ = run(term(), batch.to(torch.float32), normalizer=1)
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)


WITH_REST = {
    *("p_kl", "p_kl-mean", "gold", "gold-mean", "h_kl", "h_kl-mean", "strict-rest", "byte_prefix", "shared_prefix")
}


@pytest.mark.parametrize("case", [case for case in LOSSES if case.name in WITH_REST], ids=str)
def test_forbidden_tokens_are_finite(case: Case) -> None:
    """Bug: log-sum-exp of only −inf has a NaN gradient, for all unpaired tokens or for one token at all positions."""
    for num_known, columns in ((4, slice(4, None)), (None, slice(0, 1))):
        batch = replace(one_tokenizer(), projection=identity(8, num_known))
        batch.student_chunk_id[0] = batch.teacher_chunk_id[0] = torch.arange(7) // 2
        batch.student[..., columns] = -torch.inf
        loss, gradient = case.value_and_gradient(batch.with_logits(batch.student, 0.9 * batch.student))
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert gradient.any()


@pytest.mark.parametrize(("kind", "weights"), KINDS)
def test_vocab_topk_is_bounded_by_all_columns_and_equal_at_their_number(kind: str, weights: dict[str, float]) -> None:
    """Fewer cells are a coarser view of the same distributions; float64 rounds by 1e-16. Bug: wrong columns or rest
    cell.
    """
    batch, num_columns = two_tokenizers(), len(set(pair().indices.flatten().tolist()) - {-1})
    values = [
        run(PKLTerm(vocab_topk=k, divergence=kind, **weights), batch)[0].item()
        for k in (*range(1, num_columns + 1), 10**6, None)
    ]
    assert all(coarse <= fine + 1e-13 for coarse, fine in pairwise(values))
    assert values[-3] == values[-2] == values[-1]


def test_uld_of_the_same_probabilities_is_exactly_zero() -> None:
    """For any tokens. Bug: ties, which bf16 logits have many of, count as differences."""
    batch = one_tokenizer().to(torch.bfloat16)
    for teacher in (batch.student, torch.nn.functional.pad(batch.student, (0, 2), value=-torch.inf)):
        loss, gradient, _ = run(ULDTerm(temperature=0.7), batch.with_logits(batch.student, teacher))
        assert loss.item() == 0
        assert not gradient.any()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    batch = one_tokenizer()
    # Sums of the same 8 numbers in another order.
    assert run(ULDTerm(), batch.with_logits(batch.student, batch.student[..., order]))[0] <= 8 * 2**-52


def test_byte_prefix_keeps_tiny_mass_beside_a_certain_continuation() -> None:
    """R = 1 − e^−300. Bug: u(φ(y_1)) rounds to 0 and loses e^−300 of q(y_1), which the reverse KL sees."""
    batch = two_tokenizers().to(torch.float32)
    teacher = torch.zeros_like(batch.teacher)
    teacher.scatter_(2, batch.teacher_ids.roll(-1, 1).unsqueeze(2), 300.0)
    term = BytePrefixTerm(pieces="longest_prefix", divergence="reverse_kl")
    assert 100 < run(term, batch.with_logits(batch.student, teacher))[0] < 700


def test_strict_without_an_exact_pair_stays_connected() -> None:
    """Bug: a batch without units has no gradient."""
    batch = two_tokenizers()
    loss, gradient, kd = run(StrictTerm(), replace(batch, student_ids=torch.full_like(batch.student_ids, 4)))
    assert (loss.item(), kd.count) == (0, 0)
    assert not gradient.any()
