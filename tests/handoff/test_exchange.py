"""Messages between nodes: for all layouts and places, ranks read all their rows, and a head is sent once."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
import torch

from nemo_opd.distributed.layout import Layout, Place
from nemo_opd.handoff.buffer import Message, Receiver
from nemo_opd.handoff.link import Exchange, ExchangePlanner
from nemo_opd.handoff.outputs import windows
from nemo_opd.handoff.slices import LayoutPair, Payload, Traffic, planned_traffic
from tests.handoff.counting import EXPORTED
from tests.handoff.places import colocated, filled
from tests.handoff.teacher_ranks import (
    HIDDEN,
    LAYOUTS,
    LENGTH,
    LENGTHS,
    VOCAB,
    Ranks,
    output,
    own_tokens,
    read,
    receivers,
)

PAYLOAD = Payload(len(LENGTHS), LENGTH, VOCAB, HIDDEN, 8)

PLACES = {
    "a node each": lambda student, teacher: (filled(student, 8), filled(teacher, 8, first=8)),
    "two ranks a node": lambda student, teacher: (filled(student, 2), filled(teacher, 2)),
    "one after another": lambda student, teacher: (filled(student, 3), filled(teacher, 3, first=student)),
}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    EXPORTED.clear()
    with ExitStack() as entered:
        yield entered


def carry(exchange: Exchange, ranks: Ranks, reading: Sequence[Receiver]) -> int:
    """Transfer messages as a link does, in the same order on both sides of a pair of ranks, and return their bytes."""
    num_bytes = 0
    for teacher_rank, (messages, writer) in enumerate(zip(exchange.sends, ranks.writers, strict=True)):
        senders = {sender.identity: sender for sender in writer.senders}
        for student_rank, receiver in enumerate(reading):
            targets = [
                receiver.receive_buffer(handle, "cpu")
                for handle in exchange.receives[student_rank]
                if isinstance(message := handle.token(student_rank), Message) and message.teacher_rank == teacher_rank
            ]
            to_student = [message for message in messages if message.student_rank == student_rank]
            for target, message in zip(targets, to_student, strict=True):
                payload = message.payload(senders[message.sender].last)
                assert payload.is_contiguous()
                num_bytes += payload.nbytes
                target.copy_(payload)
    return num_bytes


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize(("student", "teacher"), LAYOUTS, ids=str)
def test_every_rank_reads_its_rows(student: Layout, teacher: Layout, places: str, stack: ExitStack) -> None:
    """Two batches, the first of full length and the second of more sequences.

    Bugs: rows of another rank; a head that is sent again; exports that are not taken, or for ranks that cannot map.
    """
    sides = LayoutPair(student, teacher, *PLACES[places](student.size, teacher.size))
    ranks = stack.enter_context(closing(Ranks.start("hidden_states", sides)))
    reading, planner = receivers(stack, student.size), ExchangePlanner(teacher.size)
    planned = sum(planned_traffic(sides, PAYLOAD), Traffic())
    full = (LENGTH,) * len(LENGTHS)
    for lengths in (full, LENGTHS * 2):
        written = replace(output(len(lengths), lengths), head=output().head)
        read_windows = windows(ranks.write(written), sides, lengths)
        num_bytes = carry(planner.plan(read_windows), ranks, reading)
        if lengths == full:
            assert num_bytes == planned.output + planned.head + planned.head // HIDDEN
        else:
            assert num_bytes < 2 * planned.output or num_bytes == planned.output == 0
        for rank, window in enumerate(read_windows):
            got = read(window, reading[rank])
            expected = written.logits[own_tokens(sides, rank, lengths), :VOCAB]
            torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
        assert not EXPORTED


def test_nothing_is_sent_on_a_node(stack: ExitStack) -> None:
    sides = colocated(Layout(2), Layout(1, 1, 2), 8)
    ranks = stack.enter_context(closing(Ranks.start("hidden_states", sides)))

    assert ExchangePlanner(2).plan(windows(ranks.write(output()), sides, LENGTHS)).is_empty
    assert not any(planned_traffic(sides, PAYLOAD))


def test_replicas_on_other_nodes_take_turns() -> None:
    """Bug: all ranks of the student read from one teacher rank, whose network then limits the step."""
    sides = LayoutPair(Layout(4), Layout(1, 1, 4), filled(4, 4), filled(4, 4, first=4))
    ranks = Ranks.start("hidden_states", sides)
    exchange = ExchangePlanner(4).plan(windows(ranks.write(output()), sides, LENGTHS))

    buffers = {writer.senders[0].identity for writer in ranks.writers}
    outputs = [
        [message.student_rank for message in messages if message.sender in buffers] for messages in exchange.sends
    ]
    assert outputs == [[0], [1], [2], [3]]
    assert {traffic.output for traffic in planned_traffic(sides, PAYLOAD)} == {3 * LENGTH * HIDDEN * 8}
    ranks.close()


def test_a_slot_has_its_own_receive_buffer(stack: ExitStack) -> None:
    """Bug: a batch that is sent ahead overwrites the batch that is being read."""
    sides = LayoutPair(Layout(1), Layout(1), (Place(0, 0),), (Place(1, 0),))
    ranks = stack.enter_context(closing(Ranks.start("hidden_states", sides, num_slots=2)))
    (receiver,), planner = receivers(stack, 1), ExchangePlanner(1)
    first, second = output(0), replace(output(1), head=output().head)
    slot_windows = []
    for slot, written in enumerate((first, second)):
        slot_windows.append(windows(ranks.write(written, slot=slot), sides, LENGTHS))
        carry(planner.plan(slot_windows[-1]), ranks, [receiver])

    for (window,), written in zip(slot_windows, (first, second), strict=True):
        got = read(window, receiver)
        torch.testing.assert_close(got, written.logits[:, :VOCAB], rtol=1e-13, atol=1e-13)


def test_receive_buffers_persist_and_grow(stack: ExitStack) -> None:
    """Bug: an allocation in each step."""
    sides = LayoutPair(Layout(1), Layout(1), (Place(0, 0),), (Place(1, 0),))
    ranks = stack.enter_context(closing(Ranks.start("hidden_states", sides)))
    (receiver,) = receivers(stack, 1)
    (window,) = windows(ranks.write(output()), sides, LENGTHS)
    (part,) = window.hidden.parts

    small = receiver.receive_buffer(part.handle, "cpu")
    assert receiver.receive_buffer(part.handle, "cpu").data_ptr() == small.data_ptr()
    assert receiver.constant(part.handle).data_ptr() == small.data_ptr()
    larger = replace(part.handle, shape=(2 * sum(LENGTHS), HIDDEN))
    assert receiver.receive_buffer(larger, "cpu").shape == larger.shape
    assert receiver.copied_bytes == 0
