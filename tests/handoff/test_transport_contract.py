"""What every transport must do, with sender and receiver in two processes."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_opd.errors import HandoffError
from nemo_opd.handoff.base import Handle, Receiver
from nemo_opd.handoff.transport import TRANSPORTS
from tests.handoff.owner import content, own


class Owner:
    def __init__(self, transport: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: Any = context.Process(target=own, args=(transport, theirs))
        self.process.start()

    def write(self, shape: tuple[int, ...], seed: int) -> Handle:
        self.pipe.send((shape, seed))
        handle = self.pipe.recv()
        assert isinstance(handle, Handle)
        return handle

    def ask(self, command: str) -> None:
        self.pipe.send(command)
        self.pipe.recv()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def stop(self) -> None:
        if self.process.is_alive():
            self.pipe.send("stop")
        self.process.join(30)
        assert isinstance(self.pipe, Connection)
        self.pipe.close()


@pytest.fixture(scope="module", params=["shared_memory", pytest.param("cuda_ipc", marks=pytest.mark.gpu)])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def process(transport: str) -> Iterator[Owner]:
    started = Owner(transport)
    yield started
    started.stop()


@pytest.fixture
def owner(process: Owner) -> Owner:
    """One process for all tests, with a new buffer for each."""
    process.ask("close")
    return process


@pytest.fixture
def mortal_owner(transport: str) -> Iterator[Owner]:
    started = Owner(transport)
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
    """Catches a mapping (or an allocation) per step, which leaks address space and costs milliseconds."""
    first = owner.write((4, 8), seed=1)
    address = receiver.tensor(first).data_ptr()
    second = owner.write((2, 8), seed=2)
    assert second.allocation == first.allocation
    assert receiver.tensor(second).data_ptr() == address
    assert torch.equal(receiver.tensor(second).cpu(), content((2, 8), 2))


def test_a_larger_tensor_is_a_new_allocation(owner: Owner, receiver: Receiver) -> None:
    """Catches a receiver that goes on reading the buffer it mapped first."""
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
    with pytest.raises(HandoffError, match="released it or died"):
        receiver.tensor(handle)


def test_the_handle_of_a_dead_sender_is_refused(mortal_owner: Owner, receiver: Receiver) -> None:
    handle = mortal_owner.write((3, 3), seed=1)
    mortal_owner.kill()
    with pytest.raises(HandoffError, match="died"):
        receiver.tensor(handle)


def test_a_killed_sender_leaves_nothing_behind(transport: str, mortal_owner: Owner, receiver: Receiver) -> None:
    """Catches named segments, which outlive a process that had no chance to unlink them."""
    before = set(Path("/dev/shm").iterdir())
    tensor = receiver.tensor(mortal_owner.write((3, 3), seed=1))
    mortal_owner.kill()
    assert set(Path("/dev/shm").iterdir()) <= before
    if transport == "shared_memory":
        assert torch.equal(tensor, content((3, 3), 1))


def test_shared_memory_that_cannot_be_had_is_one_clear_error() -> None:
    """Catches asking the kernel for it: it would kill the process instead of refusing."""
    sender_type, _ = TRANSPORTS["shared_memory"]
    with sender_type() as sender, pytest.raises(HandoffError, match=r"no \d+\.\d+ GiB of shared memory"):
        sender.tensor((2**55,), torch.bfloat16)


def test_a_handle_before_a_tensor_is_refused() -> None:
    sender_type, _ = TRANSPORTS["shared_memory"]
    with sender_type() as sender, pytest.raises(HandoffError, match="no buffer"):
        sender.handle()
