"""The contract of all transports, with sender and receiver in two processes."""

import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from nemo_opd.errors import HandoffError, SenderGoneError
from nemo_opd.handoff.buffer import Handle, Receiver
from nemo_opd.handoff.transport import TRANSPORTS
from tests import processes
from tests.handoff.owner import content, run_owner, run_reader
from tests.segments import left_of, mapped_by

pytestmark = pytest.mark.world
ON_GPUS = [pytest.param(name, marks=pytest.mark.gpu) for name in TRANSPORTS if name != "shared_memory"]


class Other:
    """Another process, and the pipe to it."""

    def __init__(self, function: Callable[..., None], transport: str, *more: object) -> None:
        self.pipe, theirs = processes.context().Pipe()
        self.process: Any = processes.make(function, transport, theirs, *more)
        self.process.start()

    def ask(self, command: object) -> Any:
        self.pipe.send(command)
        return self.pipe.recv()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def stop(self) -> None:
        if self.process.is_alive():
            self.pipe.send("stop")
        self.process.join(30)
        assert isinstance(self.pipe, Connection)
        self.pipe.close()


class Owner(Other):
    def __init__(self, transport: str) -> None:
        super().__init__(run_owner, transport)

    def write(self, shape: tuple[int, ...], seed: int) -> Handle:
        handle = self.ask(("write", shape, seed))
        assert isinstance(handle, Handle)
        return handle


class Reader(Other):
    """A receiver in a process of its own, as a student's rank."""

    def __init__(self, transport: str, number: int) -> None:
        super().__init__(run_reader, transport, number)

    def sees(self, handle: Handle, expected: torch.Tensor) -> bool:
        return bool((self.ask(handle) == expected.float().numpy()).all())


@pytest.fixture(scope="module", params=["shared_memory", *ON_GPUS])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def process(transport: str) -> Iterator[Owner]:
    started = Owner(transport)
    yield started
    started.stop()


@pytest.fixture
def owner(process: Owner) -> Owner:
    """One process for all tests, with a new sender per test."""
    process.ask(("export_to", (0,)))
    return process


@pytest.fixture
def mortal_owner(transport: str) -> Iterator[Owner]:
    started = Owner(transport)
    yield started
    started.stop()


@pytest.fixture
def mortal_reader(transport: str) -> Iterator[Reader]:
    started = Reader(transport, number=3)
    yield started
    started.stop()


@pytest.fixture
def receiver(transport: str) -> Iterator[Receiver]:
    _, kind = TRANSPORTS[transport]
    with kind() as mapped:
        yield mapped


def test_the_receiver_reads_what_the_sender_wrote(owner: Owner, receiver: Receiver) -> None:
    handle = owner.write((2, 3, 5), seed=1)
    assert torch.equal(receiver.tensor(handle).cpu(), content((2, 3, 5), 1))


def test_a_buffer_persists_and_is_mapped_once(owner: Owner, receiver: Receiver) -> None:
    """Bug: a mapping or an allocation per step, which leaks address space and costs milliseconds."""
    first = owner.write((4, 8), seed=1)
    address = receiver.tensor(first).data_ptr()
    second = owner.write((2, 8), seed=2)
    assert second.allocation == first.allocation
    assert receiver.tensor(second).data_ptr() == address
    assert torch.equal(receiver.tensor(second).cpu(), content((2, 8), 2))


def test_a_larger_tensor_is_a_new_allocation(owner: Owner, receiver: Receiver) -> None:
    """Bug: a receiver goes on reading the buffer that it mapped first."""
    small = owner.write((2, 2), seed=1)
    receiver.tensor(small)
    large = owner.write((64, 1024), seed=2)
    assert large.allocation == small.allocation + 1
    assert torch.equal(receiver.tensor(large).cpu(), content((64, 1024), 2))


def test_a_tensor_without_elements_can_be_handed_over(owner: Owner, receiver: Receiver) -> None:
    assert receiver.tensor(owner.write((0, 7), seed=1)).shape == (0, 7)


def test_closing_twice_and_writing_again_works(owner: Owner, receiver: Receiver) -> None:
    receiver.tensor(owner.write((3, 3), seed=1))
    receiver.close()
    owner.ask("close")
    owner.ask("close")
    assert torch.equal(receiver.tensor(owner.write((3, 3), seed=2)).cpu(), content((3, 3), 2))


@pytest.mark.parametrize("transport", ["shared_memory"], indirect=True)
def test_a_handle_of_a_released_buffer_is_refused(owner: Owner, receiver: Receiver) -> None:
    handle = owner.write((3, 3), seed=1)
    owner.ask("close")
    with pytest.raises(SenderGoneError, match="released it or died"):
        receiver.tensor(handle)


def test_the_handle_of_a_dead_sender_is_refused(mortal_owner: Owner, receiver: Receiver) -> None:
    handle = mortal_owner.write((3, 3), seed=1)
    mortal_owner.kill()
    with pytest.raises(SenderGoneError, match="died"):
        receiver.tensor(handle)


def test_several_receivers_read_one_buffer_and_one_of_them_may_die(
    owner: Owner, receiver: Receiver, mortal_reader: Reader
) -> None:
    """Bug: one reference for all receivers, which the first to close releases for all."""
    owner.ask(("export_to", (0, 3)))
    for shape, seed in (((2, 3), 1), ((2, 3), 2), ((64, 1024), 3)):
        handle = owner.write(shape, seed)
        assert torch.equal(receiver.tensor(handle.for_receiver(0)).cpu(), content(shape, seed))
        assert mortal_reader.sees(handle.for_receiver(3), content(shape, seed))

    mortal_reader.kill()

    # The sender writes to the buffer that the dead receiver had mapped, then to a new one.
    for shape, seed in (((64, 1024), 4), ((128, 1024), 5)):
        handle = owner.write(shape, seed)
        assert torch.equal(receiver.tensor(handle.for_receiver(0)).cpu(), content(shape, seed))
    assert owner.ask("close") == "closed"


def test_a_receiver_that_is_not_among_the_senders_receivers_is_refused(owner: Owner, transport: str) -> None:
    owner.ask(("export_to", (1, 2)))
    handle = owner.write((2, 3), seed=1)
    _, kind = TRANSPORTS[transport]
    with kind(5) as stranger, pytest.raises(KeyError, match="5"):
        stranger.tensor(handle)
    with pytest.raises(KeyError, match="0"):
        handle.for_receiver(0)
    assert [number for number, _ in handle.for_receiver(2).tokens] == [2]


def test_a_constant_on_the_own_device_is_the_mapping(owner: Owner, receiver: Receiver, transport: str) -> None:
    """Bug: a copy per call. Pinned main memory is copied to the GPU once, a near buffer not at all."""
    handle = owner.write((4, 8), seed=1)
    is_copied = transport == "pinned_memory"
    constant = receiver.constant(handle)
    assert (constant.data_ptr() == receiver.tensor(handle).data_ptr()) is not is_copied
    assert receiver.constant(handle).data_ptr() == constant.data_ptr()
    assert receiver.copied_bytes == is_copied * handle.num_bytes
    assert torch.equal(constant.cpu(), content((4, 8), 1))


def test_rows_are_near(owner: Owner, receiver: Receiver, transport: str) -> None:
    """Bug: a GPU computes with rows in main memory."""
    rows = receiver.near(receiver.tensor(owner.write((4, 8), seed=1))[1:3])
    assert rows.device.type == ("cpu" if transport == "shared_memory" else "cuda")
    assert torch.equal(rows.cpu(), content((4, 8), 1)[1:3])


def test_a_buffer_may_have_no_readers(owner: Owner, receiver: Receiver) -> None:
    """A teacher rank that no student rank reads still writes its output."""
    owner.ask(("export_to", ()))
    handle = owner.write((4, 8), seed=1)
    with pytest.raises(KeyError, match="0"):
        receiver.tensor(handle)


def test_a_killed_sender_leaves_nothing_behind(transport: str, mortal_owner: Owner, receiver: Receiver) -> None:
    """Bug: a named segment, which outlives a process that was killed before unlinking it."""
    tensor = receiver.tensor(mortal_owner.write((3, 3), seed=1))
    mapped = mapped_by(mortal_owner.process.pid)
    mortal_owner.kill()
    if transport != "cuda_ipc":
        assert torch.equal(tensor, content((3, 3), 1))
    del tensor
    receiver.close()
    assert left_of(mapped) == []


def test_shared_memory_that_cannot_be_had_is_one_clear_error() -> None:
    """Bug: asking the kernel for the memory, which kills the process instead of refusing."""
    sender_type, _ = TRANSPORTS["shared_memory"]
    with sender_type() as sender, pytest.raises(HandoffError, match=r"cannot allocate \d+\.\d+ GiB of shared memory"):
        sender.tensor((2**55,), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["cuda_ipc"], indirect=True)
def test_memory_is_freed_when_the_last_receiver_has_closed(owner: Owner, mortal_reader: Reader) -> None:
    """Bugs: a reference is never released (memory is held forever) or released twice (memory is freed too early)."""
    initial = owner.ask("memory")
    owner.ask(("export_to", (0, 3)))
    handle = owner.write((1024, 1024), seed=1)
    _, kind = TRANSPORTS["cuda_ipc"]
    with kind() as receiver:
        receiver.tensor(handle)
        assert mortal_reader.sees(handle.for_receiver(3), content((1024, 1024), 1))
        mortal_reader.ask("close")
        owner.ask("close")
        assert owner.ask("memory") >= initial + handle.num_bytes
        assert torch.equal(receiver.tensor(handle).cpu(), content((1024, 1024), 1))
    assert owner.ask("memory") <= initial


@pytest.mark.gpu
@pytest.mark.parametrize("sees_one_gpu", [False, True], ids=["all devices visible", "own device visible"])
def test_a_buffer_on_another_device_is_read_from_there(sees_one_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a device index of one process is used in another; as Ray's actors, processes may see one GPU only."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1" if sees_one_gpu else "1,0")
    remote = Owner("cuda_ipc")
    monkeypatch.undo()
    _, kind = TRANSPORTS["cuda_ipc"]
    try:
        with kind() as receiver:
            handle = remote.write((64, 128), seed=1)
            mapped = receiver.tensor(handle)
            assert mapped.device == torch.device("cuda", torch.cuda.current_device())
            assert torch.equal(mapped.index_select(0, torch.arange(3, device="cuda")).cpu(), content((64, 128), 1)[:3])
            copied = receiver.constant(handle)
            assert copied.data_ptr() != mapped.data_ptr()
            assert receiver.constant(handle).data_ptr() == copied.data_ptr()
            assert receiver.copied_bytes == handle.num_bytes
            assert torch.equal((copied @ copied.t()).cpu(), (mapped @ mapped.t()).cpu())
    finally:
        remote.stop()


def test_a_receiver_in_the_senders_process_reads_its_buffer(transport: str) -> None:
    """Bug: a buffer is exported to its own process; CUDA cannot map it, and its memory is never released."""
    buffer_device = "cuda" if transport == "cuda_ipc" else "cpu"
    sender_type, receiver_type = TRANSPORTS[transport]
    with sender_type((0, 1), own=1) as sender, receiver_type(1) as receiver:
        for size in (4, 9):  # the second in another allocation
            sender.tensor((size,), torch.float32).copy_(torch.arange(size, device=buffer_device))
            seen = receiver.tensor(sender.handle())
            assert seen.tolist() == list(range(size))
            assert seen.data_ptr() == sender.last.data_ptr()
            assert receiver.constant(sender.handle()).tolist() == seen.tolist()
            assert sender.receivers == (0,)
