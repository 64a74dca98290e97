"""Padding, empty rows and shards keep every sample; the oracle is the list of samples."""

import pickle
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_opd.data.collate import collate, compared, gather_rows, mask_unrouted, shards
from nemo_opd.data.samples import Chunks, Sample, TeacherSample, Tokens
from nemo_opd.types import Batch, ChunkRows, TeacherRows, TokenRows
from tests.rows import pad_rows

Row = list[list[int]]


def make_tokens(length: int, rng: np.random.Generator) -> Tokens:
    return Tokens(
        rng.integers(1, 9, length).astype(np.int32),
        np.arange(length) > 0,
        rng.integers(1, 9, length).astype(np.int32),
    )


def make_sample(student_length: int, teacher_length: int, rng: np.random.Generator) -> Sample:
    student, teacher = make_tokens(student_length, rng), make_tokens(teacher_length, rng)
    chunks = Chunks(np.arange(student_length, dtype=np.int32), np.arange(teacher_length, dtype=np.int32), 9, 9)
    return Sample(student, (TeacherSample(teacher, chunks), TeacherSample(student, None)))


@st.composite
def sample_lists(draw: st.DrawFn) -> list[Sample]:
    lengths = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=12))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return [make_sample(student, teacher, rng) for student, teacher in lengths]


def expected(sample: Sample) -> list[Row]:
    """Return a sample's tensors as lists."""
    rows = [[sample.student.ids, sample.student.loss_mask, sample.student.num_bytes]]
    for teacher in sample.teachers:
        rows.append([teacher.tokens.ids, teacher.tokens.loss_mask, teacher.tokens.num_bytes])
        if teacher.chunks is not None:
            rows.append([teacher.chunks.student, teacher.chunks.teacher])
    return [[array.tolist() for array in row] for row in rows]


def unpadded(batch: Batch) -> list[list[Row]]:
    """Return a batch's tensors without padding, a list per row."""

    def cut(tensor: Tensor, lengths: Tensor) -> list[list[int]]:
        return [row[:length].tolist() for row, length in zip(tensor, lengths, strict=True)]

    def rows_of(tokens: TokenRows) -> list[Row]:
        parts = [cut(part, tokens.lengths) for part in (tokens.ids, tokens.loss_mask, tokens.num_bytes)]
        return [list(row) for row in zip(*parts, strict=True)]

    columns = [rows_of(batch.student)]
    for teacher in batch.teachers:
        columns.append(rows_of(teacher.tokens))
        if teacher.chunks is not None:
            student_ids = cut(teacher.chunks.student, batch.student.lengths)
            teacher_ids = cut(teacher.chunks.teacher, teacher.tokens.lengths)
            columns.append([list(row) for row in zip(student_ids, teacher_ids, strict=True)])
    return [list(row) for row in zip(*columns, strict=True)]


def all_tokens(batch: Batch) -> list[TokenRows]:
    return [batch.student, *(teacher.tokens for teacher in batch.teachers)]


def assert_trimmed_and_masked(batch: Batch) -> None:
    for tokens in all_tokens(batch):
        width = tokens.ids.shape[1]
        assert width == max([1, *tokens.lengths.tolist()])
        padding = torch.arange(width) >= tokens.lengths[:, None]
        assert not (tokens.loss_mask & padding).any()
        assert not tokens.num_bytes[padding].any()
    for teacher in batch.teachers:
        if teacher.chunks is not None:
            for chunk_ids, tokens in (
                (teacher.chunks.student, batch.student),
                (teacher.chunks.teacher, teacher.tokens),
            ):
                assert chunk_ids.shape == tokens.ids.shape
                padding = torch.arange(chunk_ids.shape[1]) >= tokens.lengths[:, None]
                assert (chunk_ids[padding] == -1).all()


@settings(max_examples=100)
@given(sample_lists())
def test_a_batch_holds_its_samples(samples: list[Sample]) -> None:
    batch = collate(samples)
    shared = [compared(sample) for sample in samples]
    expected_rows = [
        expected(replace(ours, student=sample.student)) for sample, ours in zip(samples, shared, strict=True)
    ]
    assert unpadded(batch) == expected_rows
    assert batch.shared_bytes is not None
    assert [row.sum() for row in batch.shared_bytes.numpy()] == [ours.student.num_bytes.sum() for ours in shared]
    assert_trimmed_and_masked(batch)
    assert batch.student.ids.dtype == batch.student.lengths.dtype == torch.int64
    assert batch.student.loss_mask.dtype == torch.bool
    assert batch.student.num_bytes.dtype == torch.int32
    chunks = batch.teachers[0].chunks
    assert chunks is not None
    assert chunks.student.dtype == chunks.teacher.dtype == torch.int32
    assert batch.teachers[1].chunks is None


@settings(max_examples=100)
@given(sample_lists(), st.integers(0, 5))
def test_padding_rows_are_empty(samples: list[Sample], missing: int) -> None:
    """Bug: a padding row that scores a token or a chunk changes every normalizer."""
    batch = collate(samples)
    padded = pad_rows(batch, len(samples) + missing)
    assert unpadded(padded)[: len(samples)] == unpadded(batch)
    assert_trimmed_and_masked(padded)
    for tokens in all_tokens(padded):
        assert tokens.lengths[len(samples) :].tolist() == [0] * missing


def test_sequences_are_put_where_they_are_asked_for() -> None:
    batch = collate([make_sample(length, length + 1, np.random.default_rng(length)) for length in (4, 2, 3)])
    moved = gather_rows(batch, torch.tensor([2, -1, 0]))
    rows = unpadded(batch)
    assert [unpadded(moved)[place] for place in (0, 2)] == [rows[2], rows[0]]
    assert_trimmed_and_masked(moved)
    assert all(tokens.lengths[1] == 0 for tokens in all_tokens(moved))


@settings(max_examples=100)
@given(sample_lists(), st.integers(1, 5))
def test_shards_are_disjoint_complete_and_in_order(samples: list[Sample], num_ranks: int) -> None:
    """Catches rows lost or reordered between ranks, and unequal shards after pad_rows."""
    batch = collate(samples)
    parts = shards(batch, num_ranks)
    assert len(parts) == num_ranks
    assert [row for part in parts for row in unpadded(part)] == unpadded(batch)
    for part in parts:
        assert_trimmed_and_masked(part)
    even = shards(pad_rows(batch, -(-len(samples) // num_ranks) * num_ranks), num_ranks)
    assert len({len(part) for part in even}) == 1


def test_a_pickled_shard_carries_its_own_rows_only() -> None:
    """Bug: a view pickles the memory of the whole batch, once for each rank."""
    rng = np.random.default_rng(0)
    batch = collate([make_sample(1_000, 1_000, rng) for _ in range(8)])
    sizes = [len(pickle.dumps(part)) for part in shards(batch, 8)]
    assert sum(sizes) < 1.2 * len(pickle.dumps(batch))


def test_chunks_behind_other_contents_are_no_chunks_of_the_batch() -> None:
    """Catches chunk ids that stay although a prompt differs, and bytes or the counts of histories that change with
    them."""
    tokens = make_tokens(6, np.random.default_rng(0))
    ids = np.array([-1, 0, 0, 2, 3, 3], np.int32)

    def batch_of(stop: int) -> Batch:
        chunks = Chunks(ids, ids, changed_from=2, stop=stop)
        return collate([Sample(tokens, (TeacherSample(tokens, chunks),))])

    skipped, full = batch_of(2), batch_of(9)
    for batch, expected_ids in ((skipped, [-1, 0, 0, -1, -1, -1]), (full, ids.tolist())):
        chunks = batch.teachers[0].chunks
        assert chunks is not None
        assert chunks.student.tolist() == chunks.teacher.tolist() == [expected_ids]
        assert chunks.histories is not None
        assert chunks.histories.tolist() == [[3, 2]]
    assert skipped.student.num_bytes.equal(full.student.num_bytes)
    assert mask_unrouted(skipped, torch.tensor([1])).teachers[0].chunks.histories.tolist() == [[0, 0]]  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True)
class BatchOfMore(Batch):
    more: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ChunksOfMore(ChunkRows):
    more: torch.Tensor | None = None


def test_a_new_field_is_in_the_parts_of_a_batch() -> None:
    """Bug: a declared and filled field that no worker receives."""
    tokens = TokenRows(torch.zeros(3, 2).long(), torch.full((3,), 2), torch.ones(3, 2).bool(), torch.ones(3, 2).int())
    chunks = ChunksOfMore(torch.zeros(3, 2).int(), torch.zeros(3, 2).int(), torch.ones(3, 2).long(), torch.arange(3))
    batch = BatchOfMore(tokens, (TeacherRows(tokens, chunks),), row=torch.arange(3), more=torch.arange(3))

    part = batch.rows(1, 3)

    assert isinstance(part, BatchOfMore)
    assert part.more is not None
    assert part.more.tolist() == [1, 2]
    assert part.row is None
    (teacher,) = part.teachers
    assert isinstance(teacher.chunks, ChunksOfMore)
    assert teacher.chunks.more is not None
    assert teacher.chunks.more.tolist() == [1, 2]
    assert teacher.chunks.histories is None
