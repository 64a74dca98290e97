"""Shared memory that is registered with CUDA, which is a fake."""

import gc
import logging
from collections.abc import Iterator

import pytest
import torch

from nemo_opd.handoff import shared_memory
from nemo_opd.handoff.shared_memory import PinnedMemoryReceiver, PinnedMemorySender


class Cudart:
    """CUDA's registry of pages. status: result of each registration, 0 for success."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.registered: dict[int, int] = {}
        self.number = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        if not self.status:
            self.number += 1
            self.registered[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


@pytest.fixture(params=[0, 2], ids=["registered", "refused"])
def cudart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cudart]:
    fake = Cudart(request.param)

    def check(status: int) -> None:
        if status:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    shared_memory._warn_of_pageable_memory.cache_clear()
    yield fake
    shared_memory._warn_of_pageable_memory.cache_clear()


def test_both_sides_register_their_mapping_and_take_it_back(cudart: Cudart, caplog: pytest.LogCaptureFixture) -> None:
    """Bugs: pages stay locked after the buffer has grown; no handoff if pages cannot be locked."""
    with caplog.at_level(logging.WARNING), PinnedMemorySender() as sender, PinnedMemoryReceiver() as receiver:
        for size in (1_000, 5_000):
            sender.tensor((size,), torch.int64).copy_(torch.arange(size))
            assert receiver.tensor(sender.handle()).tolist() == list(range(size))
            gc.collect()
            assert list(cudart.registered.values()) == ([] if cudart.status else [8 * size, 8 * size])
    gc.collect()
    assert cudart.registered == {}
    assert cudart.number == (0 if cudart.status else 4)
    assert caplog.text.count("cannot be pinned (out of memory)") == (1 if cudart.status else 0)
