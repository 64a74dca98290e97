"""Buffers for other processes must not be in expandable segments. A fake allocator records calls and settings."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from nemo_opd.errors import HandoffError
from nemo_opd.handoff import cuda_ipc
from nemo_opd.handoff.cuda_ipc import CudaIpcSender

OFF, ON = "expandable_segments:False", "expandable_segments:True"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    @contextmanager
    def use_mem_pool(_: object) -> Iterator[None]:
        calls.append("own pool")
        try:
            yield
        finally:
            calls.append("common pool")

    def empty(num_bytes: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        calls.append("allocate")
        if num_bytes > 100:
            raise torch.OutOfMemoryError
        return torch.zeros(num_bytes, dtype=dtype)

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: calls.append("collect"))
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(cuda_ipc.torch, "empty", empty)
    return calls


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_off_for_the_buffer_alone(
    variable: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "max_split_size_mb:64, expandable_segments: True")
    CudaIpcSender(receivers=()).tensor((8,), torch.uint8)
    assert calls == ["collect", OFF, "own pool", "allocate", "common pool", ON]


def test_expandable_segments_are_on_again_after_an_out_of_memory_error(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", ON)
    with pytest.raises(HandoffError, match="of GPU memory for a teacher"):
        CudaIpcSender(receivers=()).tensor((1000,), torch.uint8)
    assert calls[-1] == ON


def test_segments_that_are_not_expandable_need_no_setting(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", OFF)
    CudaIpcSender(receivers=()).tensor((8,), torch.uint8)
    assert calls == ["collect", "allocate"]


def test_buffers_that_receivers_release_late_are_freed_by_the_next_step(calls: list[str]) -> None:
    """Bug: memory stays until the next buffer is released: in a run of equal steps, until its end."""
    sender = CudaIpcSender(receivers=())
    for _ in range(2):
        sender.tensor((8,), torch.uint8)
    assert calls == ["collect", "allocate", "collect"]
