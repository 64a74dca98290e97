"""Offloaded models: values come back, host memory is allocated once, frozen weights are copied once.

The host stands for the device: its storages are emptied and filled in the same way (GPUs: tests/training/test_gpu.py).
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
    layers = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 7), nn.Linear(7, 10, bias=False))
    layers[2].weight = nn.Parameter(torch.randn(10, 7))
    return layers


@pytest.mark.parametrize("block", [2**28, 64, 100])
def test_values_leave_and_come_back_to_the_same_tensors(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Bugs: bytes in the wrong place if a storage spans two blocks; views and tied weights become copies."""
    monkeypatch.setattr(host, "_BLOCK_BYTES", block)
    layers = model()
    view, tied = layers[1].weight[2:4], nn.Parameter(layers[0].weight.data)
    expected = [parameter.detach().clone() for parameter in (*layers.parameters(), tied)]
    copy = HostCopy()
    for _ in range(3):
        copy.hold([*layers.parameters(), tied])
        assert held_bytes(layers.parameters()) == 0
        copy.restore()
        for parameter, value in zip((*layers.parameters(), tied), expected, strict=True):
            assert torch.equal(parameter, value)
        assert torch.equal(view, expected[1][2:4])
    tied.data.add_(1)
    assert torch.equal(layers[0].weight, expected[0] + 1)


def test_memory_is_allocated_once_and_frozen_weights_are_copied_once() -> None:
    """Bugs: host memory is allocated in each step; unchanged weights of a teacher are copied to the host."""
    layers = model()
    layers[0].requires_grad_(False)
    frozen = layers[0].weight.nbytes
    trained = sum(parameter.nbytes for parameter in layers.parameters()) - frozen
    copy = HostCopy()
    seen = []
    for step in range(3):
        with Copies() as held:
            copy.hold(layers.parameters())
        with Copies() as restored:
            copy.restore()
        seen.append((held.allocations, held.num_bytes, restored.allocations, restored.num_bytes, restored.number))
        with torch.no_grad():
            layers[1].weight.fill_(step)
    assert seen == [(1, frozen + trained, 0, frozen + trained, 4), *[(0, trained, 0, frozen + trained, 4)] * 2]
    copy.hold(layers.parameters())
    copy.restore()
    assert (layers[1].weight == 2).all()


def test_a_sharded_model_trains_the_same_with_offload() -> None:
    """Bugs: FSDP2's views of its shards stay empty; a padded shard is moved; moments of another step."""

    def train(leaves: bool) -> list[Tensor]:
        with alone():
            sharded = model()
            mesh = init_device_mesh("cpu", (1,))
            for layer in (*sharded, sharded):
                fully_shard(layer, mesh=mesh)
            optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
            weights, moments = HostCopy(), HostCopy()
            for step in range(4):
                if leaves:
                    for unit in (*sharded, sharded):
                        unit.reshard()
                    weights.hold(sharded.parameters())
                    moments.hold(host._moments(optimizer))
                    assert held_bytes(sharded.parameters()) == held_bytes(host._moments(optimizer)) == 0
                    moments.restore()
                    weights.restore()
                sharded(torch.arange(10) * step % 7).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return [parameter.full_tensor().clone() for parameter in sharded.parameters()]  # type: ignore[attr-defined]

    for offloaded, stayed in zip(train(True), train(False), strict=True):
        assert torch.equal(offloaded, stayed)


def test_a_shard_of_uneven_parts() -> None:
    """Bug: values of a padded shard are lost. Rank 3 of 4 has one of ten rows, padded to three."""
    with as_rank(3, 4):
        embedding = model()[0]
        fully_shard(embedding, mesh=init_device_mesh("cpu", (4,)))
        (weight,) = embedding.parameters()
        expected = weight.to_local().clone()  # type: ignore[attr-defined]
        copy = HostCopy()
        copy.hold([weight])
        copy.restore()
        assert len(expected) == 1
        assert torch.equal(weight.to_local(), expected)  # type: ignore[attr-defined]


class OnGPU(nn.Linear):
    """A layer that counts calls of `to`."""

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
def test_one_wait_per_use_and_an_emptied_cache_only_if_needed(
    monkeypatch: pytest.MonkeyPatch, offload: bool, empties_cache: bool
) -> None:
    """Bugs: a wait for each tensor; memory is returned to the driver and allocated again in each step."""
    layer = OnGPU(3, 3)
    optimizer = torch.optim.AdamW(layer.parameters())
    place = DeviceOffload(layer, "cuda", offload=offload, empties_cache=empties_cache, optimizer=optimizer)
    with calls(monkeypatch) as seen:
        for step in range(3):
            with place.use(optimizer=True):
                layer(torch.ones(3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert (held_bytes(layer.parameters()) == 0) == offload
            assert (held_bytes(host._moments(optimizer)) == 0) == offload
            with place.use():
                assert held_bytes(layer.parameters()) > 0
                assert (held_bytes(host._moments(optimizer)) == 0) == offload
            assert seen == Counter(waits=2 * (step + 1) * offload, empties=2 * (step + 1) * empties_cache)
    assert layer.moves == offload


def test_the_model_is_offloaded_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = OnGPU(3, 3)
    expected = layer.weight.detach().clone()
    place = DeviceOffload(layer, "cuda", offload=True, empties_cache=False)
    with calls(monkeypatch):
        with pytest.raises(KeyError), place.use():
            raise KeyError
        assert held_bytes(layer.parameters()) == 0
        with place.use():
            assert torch.equal(layer.weight, expected)


def test_on_a_cpu_nothing_moves() -> None:
    layer = OnGPU(3, 3)
    with Copies() as copies:
        for _ in range(2):
            with DeviceOffload(layer, "cpu", offload=True, empties_cache=False).use(optimizer=True):
                layer(torch.ones(3))
    assert (layer.moves, copies.number) == (0, 0)
    assert held_bytes(layer.parameters()) > 0
