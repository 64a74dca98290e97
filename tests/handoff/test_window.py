"""Student ranks read the output of the teacher's ranks through windows."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
import torch

from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ConfigError
from nemo_opd.handoff import outputs
from nemo_opd.handoff.outputs import HiddenStatesWriter, windows
from nemo_opd.logits.rows import TensorLogits
from nemo_opd.logits.sources import PackedLogits, SideBySideLogits
from tests.handoff.counting import EXPORTED, CountingReceiver, CountingSender
from tests.handoff.places import colocated
from tests.handoff.teacher_ranks import (
    HIDDEN,
    LAYOUTS,
    LENGTH,
    LENGTHS,
    PADDED_VOCAB,
    VOCAB,
    Kind,
    Ranks,
    lengths_of,
    output,
    own_tokens,
    read,
    receivers,
    tokens_of,
)

KINDS = ("hidden_states", "logits")
NODE = 8
TWO_FOR_ONE = colocated(Layout(1), Layout(2), NODE)
"""A teacher of two data-parallel ranks and a student on the device of the first."""


@pytest.fixture(autouse=True)
def _no_exports_of_other_tests() -> None:
    EXPORTED.clear()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as entered:
        yield entered


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("student", "teacher"), LAYOUTS, ids=str)
def test_every_rank_reads_its_rows(kind: Kind, student: Layout, teacher: Layout, stack: ExitStack) -> None:
    """Two batches, the second of more rows. Bugs: a stale mapping, a wrong row, an export taken twice or never."""
    sides = colocated(student, teacher, NODE)
    ranks = stack.enter_context(closing(Ranks.start(kind, sides)))
    reading = receivers(stack, student.size)
    for seed, lengths in enumerate((LENGTHS, LENGTHS[::-1] + LENGTHS)):
        written = output(seed, lengths)
        if kind == "hidden_states":
            written = replace(written, head=output().head)  # sent only once
        for rank, window in enumerate(windows(ranks.write(written), sides, lengths)):
            logits = read(window, reading[rank])
            expected = written.logits[own_tokens(sides, rank, lengths), :VOCAB]
            torch.testing.assert_close(logits, expected, rtol=1e-13, atol=1e-13)
        assert not EXPORTED


def test_the_heads_rows_are_in_the_requested_order(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a block of the new order reads its rows from the same block of the old order."""
    monkeypatch.setattr(outputs, "_REORDERED_ROWS", 3)
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
    ranks = stack.enter_context(closing(Ranks.start("hidden_states", colocated(Layout(1), Layout(1), NODE))))
    ranks.writers[0] = HiddenStatesWriter(
        CountingSender, VOCAB, HIDDEN, torch.float64, columns=range(PADDED_VOCAB), order=order.numpy()
    )
    (window,), (receiver,) = windows(ranks.write(output()), ranks.sides, LENGTHS), receivers(stack, 1)
    torch.testing.assert_close(read(window, receiver), output().logits[:, order], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_microbatches_are_parts_of_the_window(kind: Kind, stack: ExitStack) -> None:
    sides = colocated(Layout(3), Layout(1, 2, 1), NODE)
    ranks = stack.enter_context(closing(Ranks.start(kind, sides)))
    written = output()
    for rank, (window, receiver) in enumerate(
        zip(windows(ranks.write(written), sides, LENGTHS), receivers(stack, 3), strict=True)
    ):
        expected = written.logits[own_tokens(sides, rank), :VOCAB]
        for part in (range(2), range(1, 4), range(3, 4)):
            logits = read(window, receiver, slice(part.start, part.stop))
            torch.testing.assert_close(logits, expected[tokens_of(lengths_of(window), part)], rtol=1e-13, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [Layout(2), Layout(1)], ids=str)
def test_equal_layouts_copy_nothing(kind: Kind, layout: Layout, stack: ExitStack) -> None:
    sides = colocated(layout, layout, NODE)
    ranks = stack.enter_context(closing(Ranks.start(kind, sides)))
    reading = receivers(stack, layout.size)
    for window, receiver in zip(windows(ranks.write(output()), sides, LENGTHS), reading, strict=True):
        rows = window.rows(receiver, slice(1, 3), LENGTH)
        assert receiver.copied_bytes == 0
        if kind == "hidden_states":
            assert isinstance(rows, PackedLogits)
            handle = window.hidden.parts[0].handle
            assert rows.leaves[0].data_ptr() == receiver.tensor(handle)[lengths_of(window)[0] :].data_ptr()


def test_a_microbatch_within_one_buffer_is_a_view_although_the_window_has_two(stack: ExitStack) -> None:
    """Bug: all rows of a window are copied if it has more than one buffer."""
    sides = TWO_FOR_ONE
    ranks = stack.enter_context(closing(Ranks.start("hidden_states", sides)))
    (window,), (receiver,) = windows(ranks.write(output()), sides, LENGTHS), receivers(stack, 1)
    half = len(LENGTHS) // 2

    window.rows(receiver, slice(0, half), LENGTH)
    window.rows(receiver, slice(half, None), LENGTH)
    assert receiver.copied_bytes == 0
    window.rows(receiver, slice(half - 1, half + 1), LENGTH)
    assert receiver.copied_bytes == sum(LENGTHS[half - 1 : half + 1]) * HIDDEN * 8


def test_shards_of_the_head_are_not_joined(stack: ExitStack) -> None:
    """Bug: the shards of a head are concatenated, a copy of the head. With tp=2, hidden states need no copy either."""
    sides = colocated(Layout(2), Layout(1, 1, 2), NODE)
    ranks = stack.enter_context(closing(Ranks.start("hidden_states", sides)))
    read_windows = windows(ranks.write(output()), sides, LENGTHS)
    for window, receiver in zip(read_windows, receivers(stack, 2), strict=True):
        rows = window.rows(receiver, slice(None), LENGTH)
        assert isinstance(rows, SideBySideLogits)
        assert [source.shape[2] for source in rows.sources] == [6, VOCAB - 6]
        assert receiver.copied_bytes == 0


def test_a_head_on_another_device_is_copied_once(stack: ExitStack) -> None:
    """Bugs: the weight is read over the link for every chunk, or copied for every microbatch."""
    sides = colocated(Layout(1), Layout(1), NODE)
    ranks = stack.enter_context(closing(Ranks.start("hidden_states", sides)))
    (receiver,), written = receivers(stack, 1), output()
    receiver.is_near = False
    (window,) = windows(ranks.write(written), sides, LENGTHS)
    for _ in range(2):
        logits = read(window, receiver)
        torch.testing.assert_close(logits, written.logits[:, :VOCAB], rtol=1e-13, atol=1e-13)
    (again,) = windows(ranks.write(written), sides, LENGTHS)
    again.rows(receiver, slice(None), LENGTH)

    assert receiver.copied_bytes == VOCAB * (HIDDEN + 1) * 8


class FarReceiver(CountingReceiver):
    """A receiver whose device cannot read mapped memory, as a GPU and main memory."""

    is_near = False

    def near(self, tensor: torch.Tensor) -> torch.Tensor:
        self.copied_bytes += tensor.nbytes
        return tensor.clone()


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_cannot_read_mappings_gets_rows_by_microbatch_and_the_head_once(
    kind: Kind, stack: ExitStack
) -> None:
    """Bugs: host memory as an operand of the device's kernels; all rows of a batch are copied for each microbatch."""
    sides = TWO_FOR_ONE
    ranks = stack.enter_context(closing(Ranks.start(kind, sides)))
    receiver, written = stack.enter_context(FarReceiver(0)), output()
    (window,) = windows(ranks.write(written), sides, LENGTHS)
    for start in range(len(LENGTHS)):
        logits = read(window, receiver, slice(start, start + 1))
        expected = written.logits[tokens_of(LENGTHS, range(start, start + 1)), :VOCAB]
        torch.testing.assert_close(logits, expected, rtol=1e-13, atol=1e-13)
    is_logits = kind == "logits"
    copied = sum(LENGTHS) * (VOCAB if is_logits else HIDDEN) + (0 if is_logits else VOCAB * (HIDDEN + 1))
    assert receiver.copied_bytes == copied * 8


def test_slots_hold_several_batches(stack: ExitStack) -> None:
    """Bug: a teacher that is a batch ahead overwrites the batch that the student reads."""
    sides = colocated(Layout(2), Layout(1, 1, 2), NODE)
    ranks = stack.enter_context(closing(Ranks.start("hidden_states", sides, num_slots=2)))
    first, head = output(0), output(0).head
    second = replace(output(1), head=head)
    handles = ranks.write(first, slot=0)
    ranks.write(second, slot=1)
    window = windows(handles, sides, LENGTHS)[1]

    got = read(window, *receivers(stack, 2)[1:])

    torch.testing.assert_close(got, first.logits[own_tokens(sides, 1), :VOCAB], rtol=1e-13, atol=1e-13)


def test_a_rank_without_readers_sends_no_head(stack: ExitStack) -> None:
    """Bug: each of many data-parallel ranks holds a copy of the head that is never read."""
    sides = TWO_FOR_ONE
    ranks = stack.enter_context(closing(Ranks.start("hidden_states", sides)))
    handles = ranks.write(output())

    assert handles[0].head is not None
    assert handles[1].head is None


def test_side_by_side_logits_equal_one_tensor() -> None:
    """At every width, including one that ends in the first shard, and with an empty shard."""
    logits = output().logits.unsqueeze(0)
    shards = [TensorLogits(shard.contiguous()) for shard in logits.split([3, 0, 6, 3], 2)]
    rows = torch.tensor([4, 0, 17])
    together = SideBySideLogits(shards)

    assert together.shape == logits.shape
    for width in range(PADDED_VOCAB + 1):
        assert torch.equal(together.read(rows, width), TensorLogits(logits).read(rows, width))


def test_shards_that_do_not_fit_side_by_side_are_refused() -> None:
    logits = output().logits.view(2, -1, PADDED_VOCAB)

    with pytest.raises(ConfigError, match="side by side"):
        SideBySideLogits([TensorLogits(logits), TensorLogits(logits[:1])])
    with pytest.raises(ConfigError, match="dtype"):
        SideBySideLogits([TensorLogits(logits), TensorLogits(logits.float())])
