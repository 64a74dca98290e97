"""New rows of a matrix against R·E in float64, with a dense R built another way."""

from typing import get_args

import numpy as np
import pytest
import torch

from nemo_opd.transplant import matrices
from nemo_opd.transplant.matrices import EXACT, ROLE, SUMMED, UNREACHED, RowMap, Weighting, build_row_map, drawn, mapped
from tests.tokenizers_fixture import DIGITS_ONE_BY_ONE, byte_level
from tests.transplant.oracle import dense_map

NEW = byte_level()
OLD = byte_level(450, DIGITS_ONE_BY_ONE, eos="<|im_end|>", extra=("<|endoftext|>", "<|im_start|>"))
OLD_ROWS = 460
"""More rows than the tokenizer has ids: the last are padding."""


def matrix(dtype: torch.dtype, width: int = 24) -> torch.Tensor:
    return torch.randn(OLD_ROWS, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("weighting", get_args(Weighting))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_dense_product(
    weighting: Weighting, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: weights counted from the wrong end, a token's pieces added to the next at a block's end, sums in bf16."""
    monkeypatch.setattr(matrices, "_BLOCK_CELLS", 1000)
    old, rows = matrix(dtype), build_row_map(NEW, OLD, OLD_ROWS, weighting=weighting)
    dense = torch.from_numpy(dense_map(NEW, OLD, weighting))
    assert {EXACT, ROLE, SUMMED} <= set(rows.kinds.tolist())
    expected = dense @ old[: dense.shape[1]].double()
    reached = dense.sum(1) > 0
    new = mapped(old, rows, len(rows) + 3)
    # Both are sums of a few numbers in float64, rounded once to dtype: at most half a step apart.
    torch.testing.assert_close(
        new[: len(rows)][reached].double(), expected[reached], rtol=torch.finfo(dtype).eps, atol=1e-14
    )
    mean = old[: dense.shape[1]].double().mean(0)
    for row in (*new[: len(rows)][~reached], *new[len(rows) :]):
        torch.testing.assert_close(row.double(), mean, rtol=torch.finfo(dtype).eps, atol=1e-14)


def test_copied_rows_are_equal_to_the_bit() -> None:
    """Bug: a copy goes through a sum, which turns −0 into 0 and loses a NaN's payload."""
    old = matrix(torch.bfloat16)
    old[::3, 0], old[::5, 1] = -0.0, torch.nan
    rows = build_row_map(NEW, OLD, OLD_ROWS)
    new = mapped(old, rows, len(rows))
    copied = np.flatnonzero(np.isin(rows.kinds, (EXACT, ROLE)))
    assert len(copied) > 200
    assert torch.equal(new[copied].view(torch.int16), old[rows.columns[rows.starts[copied]]].view(torch.int16))


def test_biases_are_mapped_as_matrices() -> None:
    rows = build_row_map(NEW, OLD, OLD_ROWS)
    old = matrix(torch.float32, 1)
    assert torch.equal(mapped(old[:, 0], rows, len(rows)), mapped(old, rows, len(rows))[:, 0])


def test_a_row_of_a_token_that_the_model_cannot_read_is_not_reached() -> None:
    """Bug: an index beyond the matrix, if a tokenizer has tokens without a row in its model."""
    num_rows = 300
    full, rows = build_row_map(NEW, OLD, OLD_ROWS), build_row_map(NEW, OLD, num_rows)
    assert rows.columns.max() < num_rows
    for i in range(len(rows)):
        entries = full.columns[full.starts[i] : full.starts[i + 1]]
        columns = rows.columns[rows.starts[i] : rows.starts[i + 1]]
        assert columns.tolist() == ([] if (entries >= num_rows).any() else entries.tolist())
    assert (rows.kinds == UNREACHED).sum() > (full.kinds == UNREACHED).sum()


def test_draws_have_the_moments_of_the_tokens_rows() -> None:
    """Bugs: padding rows are included, one mean or spread for all dimensions, no seed."""
    rows = build_row_map(NEW, OLD, OLD_ROWS)
    old = matrix(torch.float32) * torch.arange(1, 25) + torch.arange(24) * 10
    old[len(OLD) :] = 1e4
    count = 20_000
    new = drawn(old, rows, count, seed=3)
    tokens = old[: len(OLD)].double()
    # Five standard errors.
    assert ((new.double().mean(0) - tokens.mean(0)).abs() < 5 * tokens.std(0) / count**0.5).all()
    assert ((new.double().std(0) / tokens.std(0, correction=0) - 1).abs() < 5 / (2 * count) ** 0.5).all()
    assert torch.equal(new, drawn(old, rows, count, seed=3))
    assert not torch.equal(new, drawn(old, rows, count, seed=4))


def test_an_empty_map() -> None:
    """Bug: an exception if no token is spelled by several old tokens."""
    rows: RowMap = build_row_map(NEW, NEW, len(NEW))
    assert set(rows.kinds.tolist()) <= {EXACT, ROLE}
    old = matrix(torch.float32)[: len(NEW)] if len(NEW) <= OLD_ROWS else torch.randn(len(NEW), 4)
    assert torch.equal(mapped(old, rows, len(NEW)), old)
