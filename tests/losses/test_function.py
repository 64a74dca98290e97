"""A user's formula is cut, weighted and divided like every loss."""

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_opd.config.loss import FunctionTerm
from nemo_opd.errors import ConfigError
from nemo_opd.losses.arguments import chunk_units
from nemo_opd.losses.function import chunk_function, token_function
from nemo_opd.losses.term_loss import build
from nemo_opd.projection import ProjectionMatrix

from .cases import STUDENT, TEACHER, pair, random_chunk_ids

HERE = "tests.losses.test_function:"
B, S, T = 3, 7, 6
V, W = len(STUDENT), len(TEACHER)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def squares(student: Tensor, teacher: Tensor, *, student_ids: Tensor, power: float = 2.0) -> Tensor:
    """A power of the difference at the next token."""
    difference = student.gather(1, student_ids[:, None]) - teacher.gather(1, student_ids[:, None])
    return difference.squeeze(1).abs() ** power


def next_tokens(student: Tensor, teacher: Tensor, student_ids: Tensor, teacher_ids: Tensor, projection) -> Tensor:
    assert isinstance(projection, ProjectionMatrix)
    return student.gather(1, student_ids[:, None]).squeeze(1) * teacher.gather(1, teacher_ids[:, None]).squeeze(1)


def scalar(student: Tensor, teacher: Tensor) -> Tensor:
    return (student - teacher).square().mean()


NO_FUNCTION = 3


@pytest.mark.parametrize("chunk_size", [None, 1, 4])
def test_tokens(chunk_size: int | None) -> None:
    """Bugs: the token before, a dropped mask or weight, another divisor."""
    student = torch.randn(B, S, V, generator=generator(0), dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(B, S, V, generator=generator(1), dtype=torch.float64)
    ids = torch.randint(V, (B, S), generator=generator(2))
    mask = torch.rand(B, S, generator=generator(3)) < 0.6
    mask[:, 0] = False
    weights = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    out = token_function(
        student,
        teacher,
        function=f"{HERE}squares",
        arguments={"power": 3.0},
        ids=ids,
        mask=mask,
        sequence_weights=weights,
        normalizer=7.0,
        chunk_size=chunk_size,
    )
    expected = sum(
        weights[b] * (student[b, i - 1, ids[b, i]] - teacher[b, i - 1, ids[b, i]]).abs() ** 3
        for b in range(B)
        for i in range(1, S)
        if mask[b, i]
    )
    torch.testing.assert_close(out.loss, expected / 7)
    torch.testing.assert_close(torch.autograd.grad(out.loss, student), torch.autograd.grad(expected / 7, student))


def test_chunks() -> None:
    """Bugs: logits of another chunk, ids of the other side, another divisor."""
    student_chunk_id, teacher_chunk_id = random_chunk_ids(np.random.default_rng(5), B, S, T)
    student = torch.randn(B, S, V, generator=generator(0), dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(B, T, W, generator=generator(1), dtype=torch.float64)
    student_ids = torch.randint(V, (B, S), generator=generator(2))
    teacher_ids = torch.randint(W, (B, T), generator=generator(3))
    matrix = pair()
    out = chunk_function(
        student,
        teacher,
        function=f"{HERE}next_tokens",
        projection=matrix,
        student_ids=student_ids,
        teacher_ids=teacher_ids,
        student_chunk_id=student_chunk_id,
        teacher_chunk_id=teacher_chunk_id,
    )
    units = chunk_units(student_chunk_id, teacher_chunk_id)
    rows = zip(units.student_rows.tolist(), units.teacher_rows.tolist(), strict=True)
    places = [(divmod(student_row, S), divmod(teacher_row, T)) for student_row, teacher_row in rows]
    assert len(places) > 3
    expected = sum(
        student[b, i, student_ids[b, i + 1]] * teacher[b, j, teacher_ids[b, j + 1]] for (b, i), (_, j) in places
    ) / len(places)
    torch.testing.assert_close(out.loss, expected)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("nowhere:loss", {}, "cannot be imported"),
        (f"{HERE}NO_FUNCTION", {}, "int is not a function; name one"),
        (f"{HERE}squares", {"powr": 3}, "takes .*unexpected keyword argument 'powr'.*correct either"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_the_run(
    function: str, arguments: dict, message: str
) -> None:
    """Bug: the error appears in the first step, after the models are loaded."""
    with pytest.raises(ConfigError, match=rf"^loss.function={function}: .*{message}"):
        build(FunctionTerm(function=function, arguments=arguments), student_vocab_size=V, teacher_vocab_size=V)


def test_a_result_without_a_loss_per_row_is_refused() -> None:
    """Bug: a scalar is broadcast over the rows, or fails inside of the library."""
    logits = torch.randn(B, S, V)
    mask = torch.ones(B, S, dtype=torch.bool)
    with pytest.raises(
        ConfigError, match=r"returned \[\] for \d+ rows of logits; return a tensor with one loss per row"
    ):
        token_function(logits, logits, function=f"{HERE}scalar", ids=torch.zeros(B, S, dtype=torch.long), mask=mask)
