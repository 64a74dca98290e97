"""The loss benchmark's naive formulations compute the same losses; otherwise their times would be meaningless."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nemo_opd.projection import build_projection
from tests.tokenizers_fixture import CORPUS, byte_level, sentencepiece

TOLERANCE = 1e-9
"""Relative, in float64: about 1e3 sums of numbers with an error of 1e-16, and exp of logits up to 10."""
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def cases() -> Iterator[ModuleType]:
    """Yield the benchmark's cases; its modules import each other as scripts do."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import losses_cases
        import losses_texts  # noqa: F401
        import losses_third_party  # noqa: F401

        yield losses_cases


def logits(shape: tuple[int, int, int], seed: int) -> torch.Tensor:
    return 2 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check(case, student: torch.Tensor, teacher: torch.Tensor) -> None:
    results = []
    for loss in (case.ours, case.naive):
        leaf = student.clone().requires_grad_()
        value = loss(leaf, teacher)
        (gradient,) = torch.autograd.grad(value, leaf)
        results.append((value.detach(), gradient))
    (value, gradient), (naive_value, naive_gradient) = results
    assert torch.isfinite(value)
    torch.testing.assert_close(value, naive_value, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m: f"{case.name}: {m}")
    scale = naive_gradient.abs().max().item()
    assert scale > 0
    torch.testing.assert_close(
        gradient, naive_gradient, rtol=0, atol=TOLERANCE * scale, msg=lambda m: f"{case.name}: {m}"
    )


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_same_vocabulary(cases: ModuleType, temperature: float) -> None:
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 3] = mask[1, 5] = False
    student, teacher = logits((2, 6, 40), 0), logits((2, 6, 40), 1)
    for case in cases.same_vocab_cases(mask, 7, temperature):
        check(case, student, teacher)


def test_cross_entropy(cases: ModuleType) -> None:
    ids = torch.arange(12).view(2, 6)
    check(cases.cross_entropy_case(ids, ids > 1), logits((2, 6, 40), 0), logits((2, 6, 40), 1))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("swapped", [False, True])
def test_cross_tokenizer(cases: ModuleType, temperature: float, swapped: bool) -> None:
    tokenizers = (sentencepiece(), byte_level()) if swapped else (byte_level(), sentencepiece())
    projection = build_projection(*tokenizers, top_k=4)
    text = sys.modules["losses_texts"].text_of(*tokenizers, projection, CORPUS[3] + CORPUS[0], 48)
    units = cases.units_of(text)
    assert any(len(unit.student) == 1 < len(unit.teacher) for unit in units), "byte_prefix would have no chain"
    student = logits((1, text.student_ids.shape[1], projection.student_vocab_size), 0)
    teacher = logits((1, text.teacher_ids.shape[1], projection.teacher_vocab_size), 1)
    for case in cases.cross_tokenizer_cases(text, 20, temperature):
        check(case, student, teacher)


def test_ways_from_hidden_states(cases: ModuleType) -> None:
    """Bug: another package is timed on a different loss: a sum, different rows, or the reverse divergence."""
    third_party, two_heads = sys.modules["losses_third_party"], sys.modules["losses_two_heads"]
    cpu = torch.device("cpu")
    heads = two_heads.Heads.random(9, 50, (12, 16), torch.float32, cpu)
    rivals = third_party.find(torch.ones(1, 9, dtype=torch.bool), cpu)
    assert rivals.has_trl
    results = []
    for way in (two_heads.naive, two_heads.ours, *rivals.of_heads.values()):
        loss = way(heads)
        results.append((loss.detach(), *torch.autograd.grad(loss, heads.leaves)))
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            # fp32: sums of 50 numbers with an error of 6e-8 each, relative to the largest
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
