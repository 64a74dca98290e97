"""Packed sequences have the same losses as padded sequences."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nemo_opd.logits.rows import TensorLogits
from nemo_opd.logits.sources import PackedLogits, places_in_row
from tests.losses.cases import LOSSES, Case
from tests.packings import packing_of


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), extra=st.integers(0, 3))
def test_places_are_those_of_a_plain_loop(lengths: list[int], extra: int) -> None:
    width = max(lengths) + extra
    packing = packing_of(*lengths, width=width)
    row = [(b, s) for b, length in enumerate(lengths) for s in range(length)]

    assert [divmod(index, width) for index in packing.tokens.tolist()] == row
    assert packing.positions.tolist() == [s for _, s in row]
    for b, places in enumerate(packing.places.tolist()):
        assert [row[place] for place in places] == [(b, min(s, lengths[b] - 1)) for s in range(width)]


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), width=st.integers(1, 6))
def test_a_narrower_width_leaves_positions_out(lengths: list[int], width: int) -> None:
    assert torch.equal(places_in_row(lengths, width), places_in_row(lengths, 6)[:, :width])


def packed(logits: Tensor, lengths: list[int]) -> tuple[PackedLogits, Tensor]:
    """Pack [B, S, X]; return the logits and their leaf."""
    packing = packing_of(*lengths, width=logits.shape[1])
    leaf = logits.detach().flatten(0, 1)[packing.tokens].unsqueeze(0).requires_grad_()
    return PackedLogits(TensorLogits(leaf), packing.places), leaf


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_losses_are_those_of_padded_sequences(case: Case) -> None:
    """Catches a difference in value or gradient over several blocks; losses skip 0 to 2 positions at a row's end."""
    batch = case.batch()
    longer = batch.padded(2, 2)
    lengths = [batch.student.shape[1] + i % 3 for i in range(len(batch))]
    has_equal_positions = batch.student.shape[1] == batch.teacher.shape[1]
    teacher_lengths = (
        lengths if has_equal_positions else [batch.teacher.shape[1] + (i + 1) % 3 for i in range(len(batch))]
    )
    student, leaf = packed(longer.student, lengths)
    teacher, _ = packed(longer.teacher, teacher_lengths)
    padded = longer.student.detach().requires_grad_()

    expected = case.run(longer.with_logits(padded))
    actual = case.run(replace(longer, student=student, teacher=teacher), chunk_size=2)

    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-12, atol=1e-15)
    (gradient,) = torch.autograd.grad(actual.loss, leaf)
    (padded_gradient,) = torch.autograd.grad(expected.loss, padded)
    tokens = packing_of(*lengths, width=longer.student.shape[1]).tokens
    torch.testing.assert_close(gradient.squeeze(0), padded_gradient.flatten(0, 1)[tokens], rtol=1e-9, atol=1e-13)
    assert actual.metrics.keys() == expected.metrics.keys()
