"""Models that leave the device: values come back, host memory is allocated once, frozen weights are copied once.

The host stands for the device: storages are emptied and filled alike. On a GPU: tests/training/test_gpu.py.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_opd.workers import offload as host
from nemo_opd.workers.offload import DeviceOffload, HostCopy, storages_of
from tests.models.world import alone, as_rank


class Copies(TorchDispatchMode):
    """Counts copies and their bytes, and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.number = self.num_bytes = self.allocations = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.name().partition(".")[0]
        if name == "aten::copy_" and args[0].dtype == torch.uint8:
            self.number += 1
            self.num_bytes += args[0].nbytes
        self.allocations += name == "aten::empty" and args[0] != [0]
        return operator(*args, **(kwargs or {}))


def held_bytes(tensors: Iterator[Tensor]) -> int:
    return sum(storage.nbytes() for storage in storages_of(tensors))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 7), nn.Linear(7, 10, bias=False))
    made[2].weight = nn.Parameter(torch.randn(10, 7))
    return made


@pytest.mark.parametrize("block", [2**28, 64, 100])
def test_values_leave_and_come_back_to_the_same_tensors(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Bugs: bytes in the wrong place where a storage is in two blocks; views and ties that are copies afterwards."""
    monkeypatch.setattr(host, "_BLOCK_BYTES", block)
    own = model()
    view, tied = own[1].weight[2:4], nn.Parameter(own[0].weight.data)
    expected = [parameter.detach().clone() for parameter in (*own.parameters(), tied)]
    copy = HostCopy()
    for _ in range(3):
        copy.hold([*own.parameters(), tied])
        assert held_bytes(own.parameters()) == 0
        copy.restore()
        for parameter, value in zip((*own.parameters(), tied), expected, strict=True):
            assert torch.equal(parameter, value)
        assert torch.equal(view, expected[1][2:4])
    tied.data.add_(1)
    assert torch.equal(own[0].weight, expected[0] + 1)


def test_memory_is_allocated_once_and_what_is_frozen_copied_once() -> None:
    """Bugs: host memory that is allocated each step; weights of a teacher that are copied back unchanged."""
    own = model()
    own[0].requires_grad_(False)
    frozen = own[0].weight.nbytes
    trained = sum(parameter.nbytes for parameter in own.parameters()) - frozen
    copy = HostCopy()
    seen = []
    for step in range(3):
        with Copies() as left:
            copy.hold(own.parameters())
        with Copies() as came:
            copy.restore()
        seen.append((left.allocations, left.num_bytes, came.allocations, came.num_bytes, came.number))
        with torch.no_grad():
            own[1].weight.fill_(step)
    assert seen == [(1, frozen + trained, 0, frozen + trained, 4), *[(0, trained, 0, frozen + trained, 4)] * 2]
    copy.hold(own.parameters())
    copy.restore()
    assert (own[1].weight == 2).all()


def test_a_sharded_model_trains_as_if_it_had_not_left() -> None:
    """Bugs: FSDP2's own views of its shards left empty; a padded shard that is moved; moments of another step."""

    def train(leaves: bool) -> list[Tensor]:
        with alone():
            own = model()
            mesh = init_device_mesh("cpu", (1,))
            for layer in (*own, own):
                fully_shard(layer, mesh=mesh)
            optimizer = torch.optim.AdamW(own.parameters(), lr=0.1)
            weights, moments = HostCopy(), HostCopy()
            for step in range(4):
                if leaves:
                    for unit in (*own, own):
                        unit.reshard()
                    weights.hold(own.parameters())
                    moments.hold(host._moments(optimizer))
                    assert held_bytes(own.parameters()) == held_bytes(host._moments(optimizer)) == 0
                    moments.restore()
                    weights.restore()
                own(torch.arange(10) * step % 7).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return [parameter.full_tensor().clone() for parameter in own.parameters()]  # type: ignore[attr-defined]

    for left, stayed in zip(train(True), train(False), strict=True):
        assert torch.equal(left, stayed)


def test_a_shard_of_uneven_parts() -> None:
    """Bug: rank 3 of 4 has one of ten rows, padded to three."""
    with as_rank(3, 4):
        own = model()[0]
        fully_shard(own, mesh=init_device_mesh("cpu", (4,)))
        (weight,) = own.parameters()
        expected = weight.to_local().clone()  # type: ignore[attr-defined]
        copy = HostCopy()
        copy.hold([weight])
        copy.restore()
        assert len(expected) == 1
        assert torch.equal(weight.to_local(), expected)  # type: ignore[attr-defined]


class OnGPU(nn.Linear):
    """A layer that counts how often it is sent to a device."""

    moves = 0

    def to(self, *_: Any, **__: Any) -> "OnGPU":
        self.moves += 1
        return self


@contextmanager
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    seen: Counter[str] = Counter()

    class Stream:
        def synchronize(self) -> None:
            seen["waits"] += 1

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.update(["empties"]))
    yield seen


@pytest.mark.parametrize(("offload", "empties_cache"), [(True, True), (True, False), (False, True), (False, False)])
def test_one_wait_and_no_emptied_cache_where_all_fits(
    monkeypatch: pytest.MonkeyPatch, offload: bool, empties_cache: bool
) -> None:
    """Bugs: a wait for each tensor; memory that nobody needs given back to the driver and asked for again each step."""
    own = OnGPU(3, 3)
    optimizer = torch.optim.AdamW(own.parameters())
    place = DeviceOffload(own, "cuda", offload=offload, empties_cache=empties_cache, optimizer=optimizer)
    with calls(monkeypatch) as seen:
        for step in range(3):
            with place.use(optimizer=True):
                own(torch.ones(3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert (held_bytes(own.parameters()) == 0) == offload
            assert (held_bytes(host._moments(optimizer)) == 0) == offload
            with place.use():
                assert held_bytes(own.parameters()) > 0
                assert (held_bytes(host._moments(optimizer)) == 0) == offload
            assert seen == Counter(waits=2 * (step + 1) * offload, empties=2 * (step + 1) * empties_cache)
    assert own.moves == offload


def test_the_model_leaves_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    own = OnGPU(3, 3)
    expected = own.weight.detach().clone()
    place = DeviceOffload(own, "cuda", offload=True, empties_cache=False)
    with calls(monkeypatch):
        with pytest.raises(KeyError), place.use():
            raise KeyError
        assert held_bytes(own.parameters()) == 0
        with place.use():
            assert torch.equal(own.weight, expected)


def test_on_a_cpu_nothing_moves() -> None:
    own = OnGPU(3, 3)
    with Copies() as copies:
        for _ in range(2):
            with DeviceOffload(own, "cpu", offload=True, empties_cache=False).use(optimizer=True):
                own(torch.ones(3))
    assert (own.moves, copies.number) == (0, 0)
    assert held_bytes(own.parameters()) > 0
