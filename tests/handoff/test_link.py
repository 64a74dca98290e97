"""Links between processes: one student rank and two teacher ranks, each in a default world of its own."""

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_opd.cluster.group import Failure
from nemo_opd.distributed import process_group
from nemo_opd.distributed.process_group import serve_store
from nemo_opd.errors import HandoffError
from nemo_opd.handoff import link as link_module
from nemo_opd.handoff.buffer import Handle, Message, Receiver
from nemo_opd.handoff.link import Link, Rendezvous, StudentLinks
from nemo_opd.handoff.transport import TRANSPORTS
from tests import processes
from tests.handoff.owner import content

pytestmark = pytest.mark.world

LINK_S, DONE_S = 30.0, 20.0


def begin(device: str, gpu: int) -> None:
    """Join a world of one rank; in a run, each group has its own world."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(gpu)
    process_group.join(dist.HashStore(), 0, 1, device, LINK_S)


def teach(rank: int, rendezvous: Rendezvous, device: str, transport: str, pipe: Connection) -> None:
    """Write and send on command, until "stop"."""
    begin(device, 1 + rank)
    link = Link(rendezvous, device, teacher=rank)
    with TRANSPORTS[transport][0](()) as sender:
        while (command := pipe.recv()) != "stop":
            match command:
                case "write", shape, seed:
                    sender.tensor(shape, torch.bfloat16).copy_(content(shape, seed))
                    pipe.send(sender.handle())
                case Message() as message:
                    link.send([(message.payload(sender.last), message.student_rank)])
                    pipe.send("sent")
    link.close()


class Teacher:
    def __init__(self, rank: int, rendezvous: Rendezvous, device: str, transport: str) -> None:
        self.rank = rank
        self.pipe, theirs = processes.context().Pipe()
        self.process: Any = processes.make(teach, rank, rendezvous, device, transport, theirs)
        self.process.start()

    def write(self, shape: tuple[int, ...], seed: int) -> Handle:
        self.pipe.send(("write", shape, seed))
        handle = self.pipe.recv()
        assert isinstance(handle, Handle)
        return handle

    def send(self, handle: Handle, rows: range) -> Handle:
        """Send rows and return the handle to them."""
        message = Message(handle.sender, self.rank, 0, rows)
        self.pipe.send(message)
        return handle.sent_as(message)


Ends = tuple[StudentLinks, Receiver, list[Teacher]]
ON_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, since NCCL has one rank on each"),
]


@pytest.fixture(
    scope="module",
    params=[
        ("cpu", "shared_memory"),
        pytest.param(("cuda", "cuda_ipc"), marks=ON_GPUS),
        pytest.param(("cuda", "pinned_memory"), marks=ON_GPUS),
    ],
    ids=lambda param: param[1],
)
def both(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """The student's only rank, in this process, and the teachers. The last test kills a teacher."""
    device, transport = request.param
    num_teachers = 2 if device == "cpu" else 1
    store = serve_store("127.0.0.1", LINK_S)
    rendezvous = Rendezvous("127.0.0.1", store.port, num_students=1, num_teachers=num_teachers, timeout_s=LINK_S)
    teachers = [Teacher(rank, rendezvous, device, transport) for rank in range(num_teachers)]
    begin(device, 0)
    receiver = TRANSPORTS[transport][1](0)
    links = StudentLinks(receiver, device)
    links.join([None, rendezvous])
    yield links, receiver, teachers
    links.close()
    receiver.close()
    process_group.leave()
    for teacher in teachers:
        if teacher.process.is_alive():
            teacher.pipe.send("stop")
        teacher.process.join(DONE_S)
        assert not teacher.process.is_alive()


def test_the_student_reads_what_teachers_wrote(both: Ends) -> None:
    """Full buffers and parts of them, from both ranks at once; then again from the same memory, and larger buffers."""
    links, receiver, teachers = both
    for step, (num_rows, rows) in enumerate([(4, range(4)), (4, range(1, 3)), (40, range(40)), (40, range(7, 31))]):
        shape = (num_rows, 3, 5)
        sent = []
        for teacher in teachers:
            handle = teacher.write(shape, seed=10 * step + teacher.rank)
            sent.append(teacher.send(handle, rows))
        links.receive([(), sent])
        for teacher, handle in zip(teachers, sent, strict=True):
            assert teacher.pipe.recv() == "sent"
            expected = content(shape, 10 * step + teacher.rank)
            assert torch.equal(receiver.tensor(handle).cpu(), expected[rows.start : rows.stop])


def test_a_tensor_without_elements_need_not_be_sent(both: Ends) -> None:
    links, receiver, (teacher, *_) = both
    handle = teacher.send(teacher.write((0, 7), seed=1), range(0))
    links.receive([(), [handle]])
    assert teacher.pipe.recv() == "sent"
    assert receiver.tensor(handle).shape == (0, 7)


class Coalescing:
    """A backend such as NCCL's, which records its calls."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def send(self, _: list[torch.Tensor], rank: int, __: int) -> None:
        self.calls.append(("send", rank))

    def recv(self, _: list[torch.Tensor], rank: int, __: int) -> None:
        self.calls.append(("recv", rank))

    def _start_coalescing(self) -> None:
        self.calls.append(("start", -1))

    def _end_coalescing(self) -> None:
        self.calls.append(("end", -1))

    def abort(self) -> None: ...


def test_nccl_gets_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: each pair of ranks makes a communicator and waits for it in the middle of a step."""
    backend = Coalescing()
    monkeypatch.setattr(link_module, "connect_store", lambda *_: dist.HashStore())
    monkeypatch.setattr(link_module, "_new_backend", lambda *_: backend)
    rendezvous = Rendezvous("127.0.0.1", 0, num_students=4, num_teachers=2, timeout_s=1)
    one, none = torch.ones(1), torch.ones(0)

    Link(rendezvous, "cpu", teacher=1).send([(one, 2), (none, 1), (one, 0)])
    Link(rendezvous, "cpu", student=3).receive([(one, 1), (one, 1)])

    sent = [("start", -1), ("send", 2), ("send", 0), ("end", -1)]
    assert backend.calls == [*sent, ("start", -1), ("recv", 5), ("recv", 5), ("end", -1)]


@pytest.mark.parametrize("both", [("cpu", "shared_memory")], indirect=True)
def test_a_dead_teacher_is_noticed_at_once(both: Ends) -> None:
    """Bug: a step hangs, or reports its own failure instead of a peer's. With NCCL the step waits for the timeout."""
    links, _, (teacher, *_) = both
    handle = teacher.write((4, 3, 5), seed=1)
    lost = handle.sent_as(Message(handle.sender, teacher.rank, 0, range(1, 3)))
    os.kill(teacher.process.pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        links.receive([(), [lost]])
    assert time.monotonic() - begin < DONE_S
    assert not isinstance(caught.value, HandoffError)
    assert Failure.of(caught.value).is_from_peer
