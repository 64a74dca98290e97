import numpy as np
import pytest
import torch

from nemo_opd.losses.sparse_projection import Segments, SparseProjection

V, X = 40, 30
PAIRS = np.arange(12)


def dense(seed: int) -> np.ndarray:
    """[V, X]: pairs at the start, one of them with another weight than 1, tokens that reach nothing, then a block."""
    generator = np.random.default_rng(seed)
    matrix = np.where(generator.random((V, X)) < 0.1, generator.random((V, X)), 0)
    matrix[: len(PAIRS)] = 0
    matrix[:, : len(PAIRS)] = 0
    matrix[PAIRS, PAIRS[::-1]] = 1
    matrix[3] *= 0.25
    # A token that reaches almost all columns, and a column that almost all tokens reach.
    matrix[30, len(PAIRS) :] = generator.random(X - len(PAIRS))
    matrix[len(PAIRS) :, 20] = generator.random(V - len(PAIRS))
    matrix[15:18] = 0
    return matrix[:, matrix.any(0)]


def sparse_of(matrix: np.ndarray) -> SparseProjection:
    student, column = np.nonzero(matrix)
    return SparseProjection.of_entries(student, column, matrix[student, column], len(matrix))


def oracle(matrix: np.ndarray, log_mass: torch.Tensor) -> torch.Tensor:
    """Sum every cell of the dense matrix; empty cells are −inf."""
    return (log_mass.unsqueeze(-1) + torch.from_numpy(matrix).log()).logsumexp(-2)


def log_mass(rows: int, spread: float = 5, dtype=torch.float64) -> torch.Tensor:
    return (spread * torch.randn(rows, V, generator=torch.Generator().manual_seed(rows), dtype=dtype)).requires_grad_()


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_value_and_gradient_equal_the_dense_matrix(rows, seed):
    """Bugs: an entry copied that should be summed, in either direction, or a token that reaches nothing."""
    matrix, mass = dense(seed), log_mass(rows)
    projected = sparse_of(matrix).log_project(mass)
    expected = oracle(matrix, mass)
    weights = torch.randn(projected.shape, dtype=torch.float64)
    gradients = (torch.autograd.grad((value * weights).sum(), mass)[0] for value in (projected, expected))
    # Sums of at most 40 float64 numbers, and logarithms of numbers up to about 20.
    torch.testing.assert_close(projected, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-13)


def test_only_unpaired_tokens_are_summed():
    """Bug: pairs with weight 1 are summed, which is slow and rounds."""
    block = sparse_of(dense(0)).block
    assert not np.isin(block.tokens, np.delete(PAIRS, 3)).any()
    assert {3, 15, 16, 17} <= set(block.tokens.tolist())


def test_only_pairs_are_a_copy():
    """Bug: an empty block fails, or the copy loses its gradient."""
    mass = log_mass(3)
    projected = sparse_of(np.eye(V)[:, ::-1]).log_project(mass)
    assert torch.equal(projected, mass.flip(1))
    projected.sum().backward()
    assert (mass.grad == 1).all()


def test_repeated_calls_agree_to_the_bit():
    """Bug: sums in an order that changes between calls."""
    sparse, mass = sparse_of(dense(0)), log_mass(7, dtype=torch.float32)
    runs = [sparse.log_project(mass) for _ in range(2)]
    gradients = [torch.autograd.grad(run.square().sum(), mass)[0] for run in runs]
    assert torch.equal(*runs)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("empty", [-torch.inf, -1e30])
def test_columns_without_mass_and_far_ones_have_finite_gradients(empty):
    """Bug: exp underflows in fp32 for a whole column, and its shares are 0/0."""
    mass = log_mass(4, 150, torch.float32)
    mass.data[0] = empty
    mass.data[1, 20:] = empty
    matrix = dense(0)
    projected = sparse_of(matrix).log_project(mass)
    projected.clamp(min=-1e30).sum().backward()
    assert mass.grad.isfinite().all()
    # float32 rounds 6e-8 of numbers up to about 600.
    expected = oracle(matrix, mass.detach().double())
    np.testing.assert_allclose(projected.detach().numpy(), expected.numpy(), rtol=1e-6, atol=1e-4)


def test_padding_less_than_doubles_the_cells_and_short_segments_have_none():
    """Bug: one long segment pads all the short ones."""
    lengths = np.arange(5, 200)
    segments = Segments.of(np.append(0, np.cumsum(lengths)))
    assert len(segments.entries) - 1 < 2 * lengths.sum()
    assert (Segments.of(np.arange(0, 41, 4)).entries[:-1] >= 0).all()
