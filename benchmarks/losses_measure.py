"""Time and memory of a loss, forward and backward."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], Tensor]
"""A forward pass; its result is a scalar to go backward from."""


@dataclass(frozen=True)
class Times:
    """Of one formulation, in the order measured."""

    ms: list[float]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms)


@dataclass(frozen=True)
class Memory:
    """In bytes, above what was there before the forward pass."""

    forward_peak: int
    """The most during forward."""
    held: int
    """What is left between forward and backward."""
    backward_peak: int
    """The most during backward, `held` included."""
    gradient: int
    """Of what backward leaves in the leaves."""
    saved: int
    """What autograd saved for backward, each storage once, the inputs' own left out."""

    @property
    def peak(self) -> int:
        return max(self.forward_peak, self.backward_peak)

    @property
    def forward_transient(self) -> int:
        """What forward needs beyond what it holds for backward."""
        return self.forward_peak - self.held


def interleaved(steps: Mapping[str, Step], leaves: list[Tensor], repeats: int) -> dict[str, Times]:
    """Forward and backward of each in turn, `repeats` times after one round that does not count.

    Load from elsewhere then falls on all alike, and the ratio of one round to another's is little moved by it.
    """
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats + 1):
        for name, step in steps.items():
            _clear(leaves)
            _synchronize(leaves)
            began = time.perf_counter()
            step().backward()
            _synchronize(leaves)
            found[name].append(1e3 * (time.perf_counter() - began))
    _clear(leaves)
    return {name: Times(ms[1:]) for name, ms in found.items()}


def median_ratio(times: Times, to: Times) -> float:
    """The median over rounds of the one time over the other."""
    return statistics.median(one / other for one, other in zip(times.ms, to.ms, strict=True))


def memory(step: Step, leaves: list[Tensor], inputs: list[Tensor], *, count_saved: bool = True) -> Memory:
    """Forward and backward once; `leaves` are those that get a gradient, `inputs` all that the step reads.

    count_saved: False for what uses torch.func, which refuses the hooks that count; `saved` is 0 then.
    """
    saved = saved_bytes(step, inputs) if count_saved else 0
    _clear(leaves)
    measured = _cuda_peak if leaves[0].is_cuda else _cpu_peak
    outputs: list[Tensor] = []
    forward_peak, held = measured(lambda: outputs.append(step()))
    backward_peak, _ = measured(lambda: outputs[0].backward())
    gradient = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
    _clear(leaves)
    return Memory(forward_peak, held, held + backward_peak, gradient, saved)


def saved_bytes(step: Step, inputs: list[Tensor]) -> int:
    known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(storages.values())


def _cpu_peak(call: Callable[[], object]) -> tuple[int, int]:
    """The highest and the last level of bytes held by tensors, from every allocation and release of PyTorch's."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    assert recorded.profiler is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak, level


def _cuda_peak(call: Callable[[], object]) -> tuple[int, int]:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


def _clear(leaves: list[Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


def _synchronize(leaves: list[Tensor]) -> None:
    if leaves[0].is_cuda:
        torch.cuda.synchronize()
