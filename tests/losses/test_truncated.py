"""Losses with a teacher that sends only its likeliest tokens (methods.md §9.1)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor

from nemo_opd.config.loss import LossTerm
from nemo_opd.errors import ConfigError
from nemo_opd.logits.rows import SparseLayout, SparseLogits
from nemo_opd.logits.sources import places_in_row
from nemo_opd.losses import alm, byte_prefix, escd, sampled_chunk_kl, sampled_kl
from nemo_opd.served.programs import PromptLogprobs, encoded_rows
from tests.reference import truncated as reference

from . import cases
from .plain import cost
from .projections import spelled_matrix

NAMES = ("same_vocab", "p_kl", "gold", "h_kl", "strict", "byte_prefix", "shared_prefix", "escd", "alm")
CASES = {
    case.name: case
    for case in cases.ALL_LOSSES
    if case.name.split("-")[0] in NAMES
    and not any(part in case.name for part in ("mean", "vocab_topk", "teacher_topk", "student_topk", "union"))
} | {"uld": next(case for case in cases.LOSSES if case.name == "uld")}
WITH_REFERENCE = [
    name
    for name, case in CASES.items()
    if case.loss not in (alm, escd) and "contin" not in name and "positions" not in case.options
]
BOUNDED = ["same_vocab", "gold", "gold-tails", "h_kl", "strict-rest", "uld"]
"""Each cell gets at most one token, and nothing is renormalised on some of the tokens."""
NEXT_TOKEN_CASES = [case for case in cases.ALL_LOSSES if case.loss in (alm, sampled_kl, sampled_chunk_kl)]
"""They read only the teacher's probability of the next token."""
ATOL = 2e-6
"""The teacher's log-probabilities are fp32: 6e-8 of up to 20."""


def stored(logits: Tensor, ids: Tensor, top_k: int, value_bytes: int = 4) -> SparseLogits:
    """Return logits [B, T, W] as a cache stores them."""
    layout = SparseLayout(top_k, logits.shape[2], value_bytes, 2)
    following = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -1)], 1).flatten()
    rows = layout.encode(logits.flatten(0, 1).float().log_softmax(1), following)
    handed = torch.cat([rows, following.int().view(torch.uint8).view(-1, 4)[:, :2]], 1)
    return SparseLogits(handed, layout, places_in_row([logits.shape[1]] * len(logits), logits.shape[1]))


def truncated(batch: cases.Batch, top_k: int, value_bytes: int = 4) -> cases.Batch:
    return replace(batch, teacher=stored(batch.teacher, batch.teacher_ids, top_k, value_bytes))


def by_reference(case: cases.Case, batch: cases.Batch, top_k: int, num_padding: int = 0) -> tuple[Tensor, Tensor]:
    """Return the mean over the units and its gradient. num_padding: the teacher's last columns that are not tokens."""
    term = TypeAdapter(LossTerm).validate_python({"type": case.loss.__name__, **case.options})
    units_of = partial(reference.units, top_k=top_k, num_tokens=batch.teacher.shape[2] - num_padding)
    total = cost(term, batch, cases.TEACHER, units_of=units_of)
    return total.loss / total.num_units, total.gradient / total.num_units


def check(case: cases.Case, batch: cases.Batch, top_k: int) -> None:
    """Compare value and gradient with the reference."""
    results = case.value_and_gradient(truncated(batch, top_k))
    for ours, expected in zip(results, by_reference(case, batch, top_k), strict=True):
        torch.testing.assert_close(ours, expected, atol=ATOL, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_all_tokens_equal_the_live_teacher(name: str) -> None:
    """Catches a column, id or probability stored in another's place."""
    case = CASES[name]
    batch = case.batch()
    results = case.value_and_gradient(truncated(batch, batch.teacher.shape[2]))
    for ours, live in zip(results, case.value_and_gradient(batch), strict=True):
        torch.testing.assert_close(ours, live, atol=ATOL, rtol=1e-5)


@pytest.mark.parametrize("top_k", [1, 3, 6])
@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_value_and_gradient_equal_the_reference(name: str, top_k: int) -> None:
    """Catches a stored token in a wrong cell, mass that is lost or counted twice, and a rest cell on one side only."""
    check(CASES[name], CASES[name].batch(), top_k)


@pytest.mark.parametrize("kind", ["reverse_kl", "jsd", "tvd", "mixed"])
def test_other_divergences(kind: str) -> None:
    """Catches a divergence that is NaN for cells that are empty on both sides."""
    case = replace(CASES["gold"], options={"divergence": kind, "uncommon_weight": 0})
    check(case, case.batch(), 3)


@pytest.mark.parametrize("name", [name for name in CASES if name not in WITH_REFERENCE])
def test_gradient_fits_the_value(name: str) -> None:
    """For losses without a reference. Catches a rest cell whose gradient is lost, or is NaN if all cells have mass."""
    case, top_k = CASES[name], 3
    batch = case.batch(scale=1.0)
    student = batch.student.requires_grad_()
    teacher = truncated(batch, top_k).teacher
    torch.autograd.gradcheck(
        lambda logits: case.run(replace(batch, student=logits, teacher=teacher)).loss,
        student,
        atol=1e-5,
        rtol=1e-3,
        fast_mode=True,  # along a random direction: one coordinate at a time takes seconds
    )


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 999), scale=st.floats(0.3, 6))
def test_the_loss_grows_with_the_number_of_known_tokens(name: str, seed: int, scale: float) -> None:
    """Catches a rest cell that is not a coarser view: it must never exceed the full divergence (methods.md §9.1)."""
    case = CASES[name]
    batch = case.batch(seed, scale=scale)
    size = batch.teacher.shape[2]
    values = [case.run(truncated(batch, top_k)).loss.item() for top_k in range(1, size + 1)]
    slack = 1e-5 * (1 + values[-1])
    assert all(fewer <= more + slack for fewer, more in pairwise(values))
    assert values[-1] == pytest.approx(case.run(batch).loss.item(), abs=slack)


@pytest.mark.parametrize("name", CASES)
def test_places_without_a_token_are_ignored(name: str) -> None:
    """A server's head can have rows that are not tokens among the likeliest. Catches `uld` reading such a place as a
    token of probability 0.
    """
    case = CASES[name]
    batch = case.batch()
    three_tokens = truncated(batch, 3)
    rows, layout = three_tokens.teacher.rows, three_tokens.teacher.layout
    decoded, wider = layout.decode(rows), replace(layout, top_k=5)
    decoded = replace(
        decoded, ids=F.pad(decoded.ids, (0, 2), value=0xFFFF), log_p=F.pad(decoded.log_p, (0, 2), value=-torch.inf)
    )
    handed = torch.cat([wider.pack(decoded), rows[:, layout.row_bytes :]], 1)
    length = batch.teacher.shape[1]
    teacher = SparseLogits(handed, wider, places_in_row([length] * len(batch.teacher), length))
    results = case.value_and_gradient(replace(batch, teacher=teacher))
    for ours, expected_result in zip(results, case.value_and_gradient(three_tokens), strict=True):
        torch.testing.assert_close(ours, expected_result, atol=ATOL, rtol=1e-5)


def served(logits: Tensor, ids: Tensor, top_k: int, vocab_size: int) -> SparseLogits:
    """Return a server's answer; its head [B, T, ≥ W] has rows beyond the W tokens."""
    layout, sequences = SparseLayout(top_k, vocab_size, 4, 2), []
    for log_q, sequence_ids in zip(logits.log_softmax(2), ids, strict=True):
        top = log_q.topk(top_k, dim=1)
        realised = log_q[:-1].gather(1, sequence_ids[1:, None].long()).flatten()
        answer = PromptLogprobs(
            realised.tolist(),
            [top_k] * len(sequence_ids),
            top.indices.flatten().tolist(),
            top.values.flatten().tolist(),
        )
        sequences.append(torch.from_numpy(encoded_rows(answer, sequence_ids.numpy(), layout)))
    following = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -1)], 1).flatten().int()
    rows = torch.cat([torch.cat(sequences), following.view(torch.uint8).view(-1, 4)[:, :2]], 1)
    return SparseLogits(rows, layout, places_in_row([logits.shape[1]] * len(logits), logits.shape[1]))


@pytest.mark.parametrize("name", WITH_REFERENCE)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), padding=st.integers(1, 4), top_k=st.integers(1, 7))
def test_places_that_are_not_tokens_have_no_rank(name: str, seed: int, padding: int, top_k: int) -> None:
    """Catches the next token, whose rank is unknown, at the rank of a padding row: `uld` is 0.3 too large."""
    case = CASES[name]
    batch = case.batch(seed)
    columns = cases.random_logits(*batch.teacher.shape[:2], padding, seed + 2)
    wider = replace(batch, teacher=torch.cat([batch.teacher, columns], 2))
    teacher = served(wider.teacher, wider.teacher_ids, top_k, batch.teacher.shape[2])
    # A rest below 2⁻²⁰ is unknown (methods.md (13.3)); its t log(t/s) is 3e-5 at most.
    expected, _ = by_reference(case, wider, top_k, padding)
    assert case.run(replace(batch, teacher=teacher)).loss.item() == pytest.approx(expected.item(), abs=3e-5, rel=1e-5)


def test_three_bytes_are_near_four() -> None:
    """Catches the wrong byte of a log-probability dropped: the error is 2⁻¹⁶ of it at most."""
    batch = cases.one_tokenizer(width=8)
    rows = torch.arange(14)
    exact, near = (stored(batch.teacher, batch.teacher_ids, 5, size).known(rows) for size in (4, 3))
    assert torch.equal(exact.ids, near.ids)
    error = (exact.log_p - near.log_p).abs() / exact.log_p.abs()
    assert 0 < error.max() <= 2**-16
    assert torch.equal(exact.log_rest, near.log_rest)


def test_decoded_rows_equal_the_encoded_ones() -> None:
    """Catches a rest that includes the next token, an entropy of only the stored tokens, and ids above 2¹⁶."""
    generator = torch.Generator().manual_seed(0)
    log_p = torch.randn(4, 70_000, generator=generator).mul(5).log_softmax(1)
    following = torch.tensor([69_999, 3, -1, int(log_p[3].argmax())])
    layout = SparseLayout(64, 70_000, 3, 3)
    assert layout.handed_bytes == 399  # the limit is 400
    decoded = layout.decode(layout.encode(log_p, following))
    for i, token in enumerate(following.tolist()):
        stored_ids = {*decoded.ids[i].tolist()} | ({token} if token >= 0 else set())
        rest_ids = [j for j in range(70_000) if j not in stored_ids]
        assert decoded.log_rest[i].item() == pytest.approx(log_p[i][rest_ids].double().logsumexp(0).item(), abs=1e-5)
        assert decoded.log_p_next[i].item() == (log_p[i, token].item() if token >= 0 else 0)
        assert decoded.entropy[i].item() == pytest.approx(-(log_p[i].exp() * log_p[i]).double().sum().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("same_vocab", {"temperature": 2.0}, "temperature=2"),
        ("gold", {"temperature": 2.0}, "temperature=2"),
        ("same_vocab", {"support": "student_topk", "top_k": 3}, "support=student_topk"),
        ("p_kl", {"vocab_topk": 2}, "vocab_topk=2"),
        ("gold", {"merge": "mean"}, "merge=mean"),
        ("uld", {"compat": "trl"}, "merge=observed"),
    ],
)
def test_settings_that_need_the_full_distribution_are_refused(name: str, options: dict, message: str) -> None:
    """Catches a setting computed on part of a distribution as if it were complete."""
    case = CASES[name]
    with pytest.raises(ConfigError, match=message):
        case.run(truncated(case.batch(), 3), **options)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("case", NEXT_TOKEN_CASES, ids=str)
def test_losses_of_the_next_token_equal_the_live_teacher(case: cases.Case, top_k: int) -> None:
    """Catches a next token's probability that is counted in a rest cell, or read at another position."""
    batch = case.batch()
    results = case.value_and_gradient(truncated(batch, top_k))
    for ours, live in zip(results, case.value_and_gradient(batch), strict=True):
        torch.testing.assert_close(ours, live, atol=ATOL, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_nothing_to_compare(name: str) -> None:
    """Catches rows without a token that cannot be decoded, in a microbatch without units."""
    case = CASES[name]
    assert case.run(truncated(case.batch(), 3).without_chunks()).loss.item() == 0


@pytest.mark.parametrize("length", [1, 2])
def test_only_chunks_of_one_token(length: int) -> None:
    """Catches a block without a chain of several teacher tokens; `byte_prefix` reads no row for it."""
    case = CASES["byte_prefix"]
    batch = case.batch()
    chunks = torch.full_like(batch.student_chunk_id, -1), torch.full_like(batch.teacher_chunk_id, -1)
    for side in chunks:
        side[:, 1 : 1 + length] = torch.arange(length)
    batch = replace(batch, student_chunk_id=chunks[0], teacher_chunk_id=chunks[1])
    check(case, batch, 3)


def test_tcad_refuses_a_truncated_teacher() -> None:
    """Catches a loss that reads the rest column as a token."""
    case = next(case for case in cases.LOSSES if case.name == "tcad")
    with pytest.raises(ConfigError, match="whole distribution"):
        case.run(truncated(case.batch(), 3))


def test_the_rest_is_left_out_if_every_student_token_is_reached() -> None:
    """Catches a cell that only other units have, used as this unit's rest cell: the value was 6.8e37."""
    pieces = [b"a", b"ab", b"b", b"ba"]
    matrix = spelled_matrix([], 2, pieces, [[0], [0], [1], [1]])
    student = torch.tensor([[[0.3, -0.4], [0.0, 0.0]]], requires_grad=True)
    q = torch.tensor([0.5, 0.1, 0.3, 0.1])
    teacher = torch.stack([q.log(), torch.zeros(4)]).unsqueeze(0)
    ids, chunks = (torch.tensor([[0, 0]]), torch.tensor([[0, 0]])), torch.tensor([[-1, 0]])
    loss = byte_prefix(
        student,
        stored(teacher, ids[1], 2),
        projection=matrix,
        student_ids=ids[0],
        teacher_ids=ids[1],
        student_chunk_id=chunks,
        teacher_chunk_id=chunks,
    ).loss
    p, teacher_share = student.detach()[0, 0].softmax(0), q[[0, 2]] / 0.8
    assert loss.item() == pytest.approx((teacher_share * (teacher_share / p).log()).sum().item(), rel=1e-5)
