"""Links between real processes: a student's rank and a teacher's of two, each in a default world of its own."""

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_opd.cluster.failure import Failure
from nemo_opd.distributed.process_group import serve_store
from nemo_opd.errors import HandoffError
from nemo_opd.handoff.arrivals import Arrivals
from nemo_opd.handoff.base import Handle
from nemo_opd.handoff.link import Link, Meeting
from nemo_opd.handoff.parcel import Parcel
from nemo_opd.handoff.plan import Box
from nemo_opd.handoff.shared_memory import SharedMemoryReceiver, SharedMemorySender
from tests import processes
from tests.handoff.owner import content

pytestmark = pytest.mark.world

LINK_S, DONE_S = 30.0, 20.0
BOX = Box(range(1, 3), range(3), range(5))


def teach(rank: int, meeting: Meeting, pipe: Connection) -> None:
    """Writes and sends what it is told; ends with "stop"."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    link = Link(meeting, meeting.teacher(rank), "cpu")
    with SharedMemorySender(()) as sender:
        while (command := pipe.recv()) != "stop":
            match command:
                case "write", shape, seed:
                    sender.tensor(shape, torch.bfloat16).copy_(content(shape, seed))
                    pipe.send(sender.handle())
                case "send", boxes:
                    link.send([(Parcel(sender.identity, rank, box).cells(sender.last), 0) for box in boxes])
                    pipe.send("sent")
    link.close()


class Teacher:
    def __init__(self, rank: int, meeting: Meeting) -> None:
        context = processes.context()
        self.rank = rank
        self.pipe, theirs = context.Pipe()
        self.process: Any = context.Process(target=teach, args=(rank, meeting, theirs))
        self.process.start()

    def write(self, shape: tuple[int, ...], seed: int) -> Handle:
        self.pipe.send(("write", shape, seed))
        handle = self.pipe.recv()
        assert isinstance(handle, Handle)
        return handle

    def arrival(self, handle: Handle, box: Box | None, place: int = 0) -> Handle:
        return handle.sent_to(0, Parcel(handle.sender, self.rank, box), place)


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Arrivals, SharedMemoryReceiver, list[Teacher]]]:
    """In this process the student's only rank, which has a world of its own as well; the last test kills a teacher."""
    store = serve_store("127.0.0.1", LINK_S)
    meeting = Meeting("127.0.0.1", store.port, num_students=1, num_teachers=2, timeout_s=LINK_S)
    teachers = [Teacher(rank, meeting) for rank in range(2)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    receiver = SharedMemoryReceiver(0)
    arrivals = Arrivals(receiver, "cpu")
    arrivals.join([None, meeting])
    yield arrivals, receiver, teachers
    arrivals.close()
    receiver.close()
    dist.destroy_process_group()
    for teacher in teachers:
        if teacher.process.is_alive():
            teacher.pipe.send("stop")
        teacher.process.join(DONE_S)
        assert not teacher.process.is_alive()


def test_the_student_reads_what_teachers_wrote(
    both: tuple[Arrivals, SharedMemoryReceiver, list[Teacher]],
) -> None:
    """Whole buffers and cells of them, of both ranks at once; again, of the same memory, and of larger buffers."""
    arrivals, receiver, teachers = both
    for step, shape in enumerate([(4, 3, 5), (4, 3, 5), (40, 3, 5)]):
        found = []
        for teacher in teachers:
            handle = teacher.write(shape, seed=10 * step + teacher.rank)
            teacher.pipe.send(("send", [None, BOX]))
            found += [teacher.arrival(handle, None), teacher.arrival(handle, BOX, place=1)]
        arrivals.receive([(), found])
        for teacher, (whole, cells) in zip(teachers, (found[:2], found[2:]), strict=True):
            assert teacher.pipe.recv() == "sent"
            expected = content(shape, 10 * step + teacher.rank)
            assert torch.equal(receiver.tensor(whole), expected)
            assert torch.equal(receiver.tensor(cells), expected[BOX.slices])


def test_a_tensor_without_elements_need_not_be_sent(
    both: tuple[Arrivals, SharedMemoryReceiver, list[Teacher]],
) -> None:
    arrivals, receiver, (teacher, _) = both
    handle = teacher.arrival(teacher.write((0, 7), seed=1), None)
    teacher.pipe.send(("send", [None]))
    arrivals.receive([(), [handle]])
    assert teacher.pipe.recv() == "sent"
    assert receiver.tensor(handle).shape == (0, 7)


def test_a_dead_teacher_is_noticed_at_once(both: tuple[Arrivals, SharedMemoryReceiver, list[Teacher]]) -> None:
    """As a peer's failure, so that the driver looks for its cause; the last test."""
    arrivals, _, (teacher, _) = both
    handle = teacher.arrival(teacher.write((4, 3, 5), seed=1), BOX, place=2)
    os.kill(teacher.process.pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        arrivals.receive([(), [handle]])
    assert time.monotonic() - begin < DONE_S
    assert not isinstance(caught.value, HandoffError)
    assert Failure.of(caught.value).is_of_a_peer
