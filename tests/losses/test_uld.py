import numpy as np
import pytest
import torch

from nemo_opd.losses.uld import uld

from . import oracle, oracle_prefix

B, S, T, V, W = 2, 7, 6, 9, 11
CHUNKS = oracle.random_chunk_ids(np.random.default_rng(3), B, S, T)
LISTS = tuple(side.tolist() for side in CHUNKS)
COUNT = len(list(oracle_prefix.chunks_of(*LISTS)))


def logits(positions: int, width: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(B, positions, width, generator=generator, dtype=torch.float64)).to(dtype)


def run(student, teacher, chunks=CHUNKS, **options):
    return uld(
        student,
        teacher,
        student_ids=torch.zeros_like(chunks[0], dtype=torch.long),
        teacher_ids=torch.zeros_like(chunks[1], dtype=torch.long),
        student_chunk_id=chunks[0],
        teacher_chunk_id=chunks[1],
        **options,
    )


@pytest.mark.parametrize("tau", [1.0, 2.5])
@pytest.mark.parametrize("sizes", [(V, W), (W, V), (V, V)])
def test_value_equals_the_loop(tau, sizes):
    """Either side may be the shorter one; columns beyond a vocabulary take part in no sort."""
    student, teacher = logits(S, sizes[0] + 2, 0), logits(T, sizes[1] + 3, 1)
    given = {"student_vocab_size": sizes[0], "teacher_vocab_size": sizes[1]}
    out = run(student, teacher, temperature=tau, chunk_size=2, **given)
    cut = (student[..., : sizes[0]].tolist(), teacher[..., : sizes[1]].tolist())
    expected = oracle_prefix.uld(*cut, LISTS, tau)
    assert out.loss.item() == pytest.approx(expected / COUNT, rel=1e-12)
    assert out.metrics["kd"].value() == pytest.approx(expected / COUNT, rel=1e-12)
    assert out.metrics["kd"].count == COUNT


def test_by_default_heads_of_different_width_are_used_whole():
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    expected = oracle_prefix.uld(student.tolist(), teacher.tolist(), LISTS, 1.0)
    assert run(student, teacher, normalizer=1).loss.item() == pytest.approx(expected, rel=1e-12)


def test_gradient_where_the_teacher_is_the_shorter_side():
    """The absolute value and the order of a sort bend only at ties, and there are none near these logits."""
    teacher = logits(T, V, 1)

    def loss(student):
        return run(student, teacher, temperature=1.7, chunk_size=2, normalizer=4).loss

    assert torch.autograd.gradcheck(loss, logits(S, W, 0).requires_grad_())


def test_teacher_equal_to_student_up_to_the_order_of_tokens_is_exactly_zero():
    """Ties, of which bf16 logits have many, are no difference either."""
    student = logits(S, V, 0, torch.bfloat16).requires_grad_()
    for teacher in (student.detach().clone(), torch.nn.functional.pad(student.detach(), (0, 2), value=-torch.inf)):
        out = run(student, teacher, (CHUNKS[0],) * 2, temperature=0.7)
        out.loss.backward()
        assert out.loss.item() == 0
        assert not student.grad.any()
    order = torch.randperm(V, generator=torch.Generator().manual_seed(0))
    mixed = run(student.double(), student.detach().double()[..., order], (CHUNKS[0],) * 2)
    # Sums of the same 9 numbers in another order.
    assert mixed.loss.item() == pytest.approx(0, abs=9 * 2**-52)


def test_extreme_logits_are_within_the_bound():
    student = 150 * logits(S, V, 0, torch.float32).sign()
    out = run(student, 150 * logits(T, W, 1, torch.float32).sign())
    assert 0 <= out.loss.item() <= 2
