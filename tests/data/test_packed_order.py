"""Batches of packed rows depend on data, settings and step alone, and each epoch has every window once."""

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice

import numpy as np
import pytest

from nemo_opd.data import order
from nemo_opd.data.loader import TrainLoader, made_of_all
from nemo_opd.data.order import BatchOrder, PackedOrder, lengths_of
from nemo_opd.data.samples import Chunks, Sample, TeacherSample, Tokens
from nemo_opd.errors import CheckpointError
from nemo_opd.types import Batch
from tests.data.test_loader import FakeDocuments

NUM_DOCUMENTS, LIMIT, ROWS = 50, 16, 3
BLOCK = 24


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "BLOCK", BLOCK)


def tokens(number: int, length: int) -> Tokens:
    return Tokens(np.full(length, number, np.int32), np.arange(length) > 0, np.ones(length, np.int32))


def windows_of(text: str) -> tuple[Sample, ...]:
    """Document i has i % 3 + 1 windows whose lengths depend on i; all ids of window k are i · 10 + k."""
    number = int(text)
    windows = []
    for k in range(number % 3 + 1):
        length = (7 * number + 5 * k) % 16 + 1
        student, teacher = tokens(10 * number + k, length), tokens(10 * number + k, min(20, length + number % 4))
        unaligned = Chunks(np.full(length, -1, np.int32), np.full(len(teacher), -1, np.int32), 0, 0)
        windows.append(Sample(student, (TeacherSample(teacher, unaligned),)))
    return tuple(windows)


def without_teachers(text: str) -> tuple[Sample, ...]:
    return tuple(Sample(window.student, ()) for window in windows_of(text))


def order_of(seed: int = 5, shuffle: bool = True, batch_size: int = ROWS) -> PackedOrder:
    return PackedOrder(NUM_DOCUMENTS, batch_size, seed, shuffle, LIMIT)


def loader_of(num_workers: int = 0, seed: int = 5, shuffle: bool = True) -> TrainLoader[tuple[Sample, ...]]:
    return TrainLoader(FakeDocuments(NUM_DOCUMENTS), windows_of, order_of(seed, shuffle), num_workers)


def rows(batch: Batch) -> list[tuple[int, ...]]:
    """Return the window ids of each row."""
    assert batch.row is not None
    first = batch.student.ids[:, 0].tolist()
    return [tuple(first[i] for i in np.flatnonzero(batch.row == r)) for r in range(int(batch.row[-1]) + 1)]


def epochs(loader: TrainLoader[tuple[Sample, ...]]) -> Iterator[list[Batch]]:
    batch = loader.next()
    while True:
        epoch, batches = loader.epoch, []
        while loader.epoch == epoch:
            batches.append(batch)
            batch = loader.next()
        yield batches


ALL = sorted(int(window.student.ids[0]) for i in range(NUM_DOCUMENTS) for window in windows_of(str(i + 1)))


@pytest.fixture(scope="module")
def three() -> list[list[Batch]]:
    with pytest.MonkeyPatch.context() as patch, loader_of() as loader:
        patch.setattr(order, "BLOCK", BLOCK)
        return list(islice(epochs(loader), 3))


def test_every_epoch_has_every_window_once_in_rows_that_fit(three: list[list[Batch]]) -> None:
    for batches in three:
        assert sorted(window for batch in batches for row in rows(batch) for window in row) == ALL
        assert all(len(rows(batch)) == ROWS for batch in batches[:-1])
        for batch in batches:
            assert batch.row is not None
            assert batch.row.bincount(batch.student.lengths).max() <= LIMIT
    first, second, third = ([rows(batch) for batch in batches] for batches in three)
    assert first != second != third


def blocks_of(order: list[int], is_full: Callable[[list[Sample]], bool]) -> list[set[int]]:
    """Return the documents of each block, numbered from 1; a block ends with the document that fills it."""
    blocks: list[set[int]] = [set()]
    windows: list[Sample] = []
    for number in order:
        if is_full(windows):
            blocks.append(set())
            windows = []
        blocks[-1].add(number + 1)
        windows += windows_of(str(number + 1))
    return blocks


def check_rows_are_of_one_block(
    batches: list[Batch], order: PackedOrder, is_full: Callable[[list[Sample]], bool]
) -> None:
    """Check that rows come block by block, so that a resumed run reads one block only."""
    blocks = blocks_of(order.of_epoch(0).tolist(), is_full)
    row_blocks = []
    for batch in batches:
        for row in rows(batch):
            row_documents = {window // 10 for window in row}
            (block,) = (i for i, documents in enumerate(blocks) if row_documents & documents)
            assert row_documents <= blocks[block]
            row_blocks.append(block)
    assert row_blocks == sorted(row_blocks)
    assert set(row_blocks) == set(range(len(blocks)))
    assert len(blocks) > 2


def test_rows_are_of_one_block(three: list[list[Batch]]) -> None:
    check_rows_are_of_one_block(three[0], order_of(), lambda windows: len(windows) >= BLOCK)


def test_a_block_of_long_windows_ends_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: at 32,768 tokens a window, 4,096 windows took 13 minutes to tokenize before the first step."""
    monkeypatch.setattr(order, "BLOCK", 1000)
    monkeypatch.setattr(order, "BLOCK_TOKENS", 100)
    monkeypatch.setattr(order, "BLOCK_ROWS", 8)
    with loader_of() as loader:
        first = next(epochs(loader))

    check_rows_are_of_one_block(
        first, order_of(), lambda windows: sum(len(window.student) for window in windows) >= 8 * LIMIT
    )
    lengths = [lengths_of(windows) for windows in made_of_all(FakeDocuments(NUM_DOCUMENTS), windows_of, 0)]
    assert order_of().num_batches(0, lengths) == len(first)


def test_the_number_of_batches_is_known_from_lengths(three: list[list[Batch]]) -> None:
    lengths = [lengths_of(windows) for windows in made_of_all(FakeDocuments(NUM_DOCUMENTS), windows_of, 0)]
    assert [order_of().num_batches(epoch, lengths) for epoch in range(3)] == [len(batches) for batches in three]
    for size in (1, 7, 1000):
        total = sum(len(rows(batch)) for batch in three[0])
        assert order_of(batch_size=size).num_batches(0, lengths) == -(-total // size)


def test_resume_at_every_step(three: list[list[Batch]]) -> None:
    """Catches a wrong resume at step 0, within and at the end of a block, and around the end of an epoch."""
    expected = [rows(batch) for batches in three[:2] for batch in batches]
    with loader_of() as first:
        for step in range(len(expected)):
            with loader_of() as resumed:
                resumed.load_state_dict(first.state_dict())
                assert resumed.epoch == first.epoch
                assert [rows(resumed.next()) for _ in range(len(expected) - step)] == expected[step:]
                assert resumed.epoch == 1
            first.next()


@pytest.mark.world
def test_processes_make_the_same_rows(three: list[list[Batch]]) -> None:
    expected = [rows(batch) for batches in three[:2] for batch in batches]
    with closing(loader_of(num_workers=2)) as loader:
        assert [rows(loader.next()) for _ in expected[:5]] == expected[:5]
        state = loader.state_dict()
    with closing(loader_of(num_workers=2)) as loader:
        loader.load_state_dict(state)
        assert [rows(loader.next()) for _ in expected[5:]] == expected[5:]
    all_windows = list(made_of_all(FakeDocuments(NUM_DOCUMENTS), windows_of, 1))
    assert [int(windows[0].student.ids[0]) // 10 for windows in all_windows] == list(range(1, NUM_DOCUMENTS + 1))


def test_another_seed_and_no_shuffling(three: list[list[Batch]]) -> None:
    with loader_of(seed=6) as reseeded, loader_of(shuffle=False) as plain:
        assert rows(reseeded.next()) != rows(three[0][0])
        first, second = islice(epochs(plain), 2)
    assert [rows(batch) for batch in first] == [rows(batch) for batch in second]
    begins = [min(row) // 10 for batch in first for row in rows(batch)]
    assert begins[:4] == sorted(begins[:4])
    assert begins[0] == 1


@pytest.mark.parametrize(
    "changed", ["limit", "block", "block_tokens", "batch_size", "num_documents", "seed", "shuffle"]
)
def test_a_state_of_other_rows_is_refused(changed: str) -> None:
    with loader_of() as loader:
        state = loader.state_dict()
        with pytest.raises(CheckpointError, match=f"the checkpoint's data order has {changed}="):
            loader.load_state_dict({**state, changed: state[changed] + 1})


def test_a_state_without_packing_is_refused() -> None:
    plain = {"num_batches": 1, "num_documents": NUM_DOCUMENTS, "batch_size": ROWS, "seed": 5, "shuffle": 1}
    with loader_of() as loader, pytest.raises(CheckpointError, match=r"limit=none"):
        loader.load_state_dict(plain)


def test_a_state_with_packing_is_refused_without() -> None:
    with loader_of() as loader:
        state = loader.state_dict()
    plain = BatchOrder(NUM_DOCUMENTS, ROWS, seed=5, shuffle=True)
    with pytest.raises(CheckpointError, match=r"has \w+=\d+, this run has \w+=none"):
        plain.require_same(state)


def test_the_next_block_is_read_while_rows_are_drawn() -> None:
    """Bug: a pause at each block, while all of it is read."""
    read: list[int] = []
    order = order_of(batch_size=1)

    def read_windows() -> Iterator[list[tuple[Sample, ...]]]:
        for indices in order.reads(order.start):
            for index in indices:
                read.append(index)
                yield [windows_of(str(index + 1))]

    numbers = []
    for _ in islice(order.draws(order.start, read_windows()), 30):
        numbers.append(len(read))
    assert max(np.diff(numbers)) < 0.5 * numbers[0]
    assert numbers[-1] > 2 * numbers[0]


def test_teachers_do_not_change_the_order(three: list[list[Batch]]) -> None:
    """Bug: rows within every model's limit gave a run without the teacher different texts in a different order."""
    with TrainLoader(FakeDocuments(NUM_DOCUMENTS), without_teachers, order_of(), 0) as loader:
        for batches in three[:2]:
            assert [rows(loader.next()) for _ in batches] == [rows(batch) for batch in batches]
