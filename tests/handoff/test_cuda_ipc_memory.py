"""Buffers for other processes are not made of expandable segments; a fake notes what the allocator is told."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from nemo_opd.errors import HandoffError
from nemo_opd.handoff import cuda_ipc
from nemo_opd.handoff.cuda_ipc import CudaIpcSender

OFF, ON = "expandable_segments:False", "expandable_segments:True"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []

    @contextmanager
    def use_mem_pool(_: object) -> Iterator[None]:
        told.append("own pool")
        try:
            yield
        finally:
            told.append("common pool")

    def empty(num_bytes: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        told.append("allocate")
        if num_bytes > 100:
            raise torch.OutOfMemoryError
        return torch.zeros(num_bytes, dtype=dtype)

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: told.append("collect"))
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(cuda_ipc.torch, "empty", empty)
    return told


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_off_for_the_buffer_alone(
    variable: str, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "max_split_size_mb:64, expandable_segments: True")
    CudaIpcSender(receivers=()).tensor((8,), torch.uint8)
    assert told == ["collect", OFF, "own pool", "allocate", "common pool", ON]


def test_they_are_on_again_where_there_is_no_memory(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", ON)
    with pytest.raises(HandoffError, match="of GPU memory for a teacher"):
        CudaIpcSender(receivers=()).tensor((1000,), torch.uint8)
    assert told[-1] == ON


def test_other_settings_are_left(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", OFF)
    CudaIpcSender(receivers=()).tensor((8,), torch.uint8)
    assert told == ["collect", "allocate"]


def test_what_receivers_let_go_of_late_is_freed_by_the_next_step(told: list[str]) -> None:
    """Bug: it stays until another buffer is released, which in a run of equal steps is its end."""
    sender = CudaIpcSender(receivers=())
    for _ in range(2):
        sender.tensor((8,), torch.uint8)
    assert told == ["collect", "allocate", "collect"]
