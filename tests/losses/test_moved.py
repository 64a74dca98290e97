"""Losses of a teacher with another prompt before the response, against losses of the response alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nemo_opd.config.loss import FunctionTerm, LossTerm, SameVocabTerm, SampledKLTerm, TCADTerm
from nemo_opd.logits.rows import TensorLogits
from nemo_opd.logits.sources import AveragedLogits, PackedLogits, places_in_row
from nemo_opd.losses.term_loss import build
from nemo_opd.types import MovedRows, SampledRows, TeacherRows, TokenRows

WIDTH, VOCAB = 12, 11
STARTS, STOPS, BY = (4, 2, 5), (12, 9, 10), (5, 0, -3)
"""For each response: its start and end in the student's sequence, and the teacher's offset."""
TERMS: dict[str, LossTerm] = {
    "forward_kl": SameVocabTerm(),
    "jsd": SameVocabTerm(divergence="jsd", beta=0.3, temperature=1.5),
    "union": SameVocabTerm(support="union", top_k=3),
    "tcad": TCADTerm(support_size=4, coverage_coef=0.3, power_alpha=None),
    "sampled_kl": SampledKLTerm(importance_level="sequence", importance_cap=1.5),
    "direct": SampledKLTerm(estimator="k3", update="direct"),
}


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def difference(student: Tensor, teacher: Tensor, student_ids: Tensor) -> Tensor:
    """A user's loss: squared difference of the next token's logits."""
    return (student - teacher).gather(1, student_ids[:, None]).squeeze(1).square()


def student_rows() -> TokenRows:
    ids = torch.randint(0, VOCAB, (3, WIDTH), generator=torch.Generator().manual_seed(0))
    places = torch.arange(WIDTH)
    mask = (places >= torch.tensor(STARTS)[:, None]) & (places < torch.tensor(STOPS)[:, None])
    return TokenRows(ids, torch.tensor(STOPS), mask, torch.ones(3, WIDTH, dtype=torch.int32))


def sampled_rows(width: int) -> SampledRows:
    logprobs = -drawn(3, width, seed=3).abs()
    return SampledRows(torch.ones(3, dtype=torch.bool), logprobs, logprobs - 0.1, torch.zeros(3), torch.arange(3))


def teacher_rows(student: TokenRows) -> TeacherRows:
    """Make the teacher's sequences, with the responses moved by `BY`; losses do not read the tokens before them."""
    lengths = [stop + by for stop, by in zip(STOPS, BY, strict=True)]
    ids = torch.zeros(3, max(lengths), dtype=torch.long)
    mask = torch.zeros(3, max(lengths), dtype=torch.bool)
    for b, (start, stop, by) in enumerate(zip(STARTS, STOPS, BY, strict=True)):
        ids[b, start + by : stop + by], mask[b, start + by : stop + by] = student.ids[b, start:stop], True
    tokens = TokenRows(ids, torch.tensor(lengths), mask, torch.zeros_like(ids).int())
    return TeacherRows(tokens, None, moved=MovedRows(torch.tensor(BY), student.loss_mask))


def packed(rows: TeacherRows, student: TokenRows, seed: int) -> tuple[Tensor, PackedLogits]:
    """Return the logits of the teacher's tokens, one sequence after another, and as losses read them."""
    lengths = rows.tokens.packed_lengths
    logits = drawn(1, sum(lengths), VOCAB, seed=seed)
    width, by = rows.logit_positions(student)
    return logits, PackedLogits(TensorLogits(logits), places_in_row(lengths, width, by))


def cut_out(values: Tensor, starts: list[int], width: int) -> Tensor:
    """Return [3, width], starting one position before each response, so all responses begin at position 1."""
    return torch.stack([values[b, start - 1 : start - 1 + width] for b, start in enumerate(starts)])


@pytest.mark.parametrize("name", TERMS)
def test_every_loss_equals_the_loss_of_the_responses(name: str) -> None:
    """Bug: the teacher's logits of another position, another sequence or its prompt."""
    student, samples = student_rows(), sampled_rows(WIDTH)
    teacher, loss = teacher_rows(student), build(TERMS[name])
    logits, read = packed(teacher, student, seed=1)
    student_logits = drawn(3, WIDTH, VOCAB, seed=2).requires_grad_()
    out = loss.plan(student_logits, read, teacher.student_side(student), teacher, 7.0, sampled=samples).compute()
    out.loss.backward()
    gradient, student_logits.grad = student_logits.grad, None

    width = max(stop - start for start, stop in zip(STARTS, STOPS, strict=True)) + 1
    lengths = teacher.tokens.packed_lengths
    theirs = torch.nn.utils.rnn.pad_sequence(list(logits[0].split(lengths)), batch_first=True)
    padded = torch.cat([theirs, torch.zeros(3, width, VOCAB)], 1)
    starts = list(STARTS)
    moved = [start + by for start, by in zip(STARTS, BY, strict=True)]
    ours = torch.cat([student_logits, torch.zeros(3, width, VOCAB)], 1)

    def wide(values: Tensor) -> Tensor:
        return cut_out(torch.cat([values, torch.zeros(3, width, dtype=values.dtype)], 1), starts, width)

    mask = wide(student.loss_mask)
    tokens = TokenRows(wide(student.ids), mask.sum(1) + 1, mask, wide(student.num_bytes))
    cut = replace(samples, logprobs=wide(samples.logprobs), behaviour_logprobs=wide(samples.behaviour_logprobs))
    rows = (cut_out(ours, starts, width), cut_out(padded, moved, width))
    expected = loss.plan(*rows, tokens, TeacherRows(tokens, None), 7.0, sampled=cut).compute()
    expected.loss.backward()

    assert loss.count(teacher.student_side(student), teacher, samples) == (
        loss.count(tokens, TeacherRows(tokens, None), cut)
    )
    assert out.loss.item() != 0
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, student_logits.grad, rtol=1e-5, atol=1e-7)


def test_a_users_loss_gets_the_rows_of_the_responses() -> None:
    """Bug: the user's function gets rows of the teacher's prompt."""
    student = student_rows()
    teacher = teacher_rows(student)
    logits, read = packed(teacher, student, seed=1)
    student_logits = drawn(3, WIDTH, VOCAB, seed=2)
    loss = build(FunctionTerm(function="tests.losses.test_moved:difference"))
    value = loss.plan(student_logits, read, teacher.student_side(student), teacher, 1.0).compute().loss

    bounds = torch.tensor([0, *teacher.tokens.packed_lengths]).cumsum(0).tolist()
    total = torch.zeros(())
    for b, (start, stop, by) in enumerate(zip(STARTS, STOPS, BY, strict=True)):
        theirs = logits[0, bounds[b] + start + by - 1 : bounds[b] + stop + by - 1]
        total += difference(student_logits[b, start - 1 : stop - 1], theirs, student.ids[b, start:stop]).sum()
    torch.testing.assert_close(value, total)


def test_logits_of_several_teachers_are_averaged_at_the_students_positions() -> None:
    """One teacher has its own prompt, one the student's. Bug: logits of different tokens are averaged."""
    student = student_rows()
    teacher = teacher_rows(student)
    logits, moved = packed(teacher, student, seed=1)
    second_logits = drawn(3, WIDTH, VOCAB, seed=4)
    mean = AveragedLogits([moved, second_logits], [1.0, 3.0])
    row = 1 * WIDTH + 5
    place = teacher.tokens.packed_lengths[0] + 5 + BY[1]
    expected = 0.25 * logits[0, place] + 0.75 * second_logits[1, 5]
    torch.testing.assert_close(mean.read(torch.tensor([row]), VOCAB)[0], expected)
