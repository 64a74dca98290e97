"""A model whose layers come one by one computes what it computes whole, with two layers there at most.

The host stands for the device, as in test_residence.py: storages are emptied and filled alike.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_opd.distributed.collectives import local
from nemo_opd.models.parallelize import shard
from nemo_opd.models.tensor_plan import decoder_layers
from nemo_opd.workers.offload import LayerStream, storages_of
from tests.models.families import SIZES
from tests.models.world import alone, on_ranks

IDS = torch.arange(14).view(2, 7)


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 4, "intermediate_size": 25}))
    return made.eval().requires_grad_(False)


def num_bytes(tensors: Any) -> int:
    return sum(storage.nbytes() for storage in storages_of(tensors))


def logits(of: LlamaForCausalLM) -> Tensor:
    with torch.no_grad():
        return of(input_ids=IDS).logits


def watched(of: LlamaForCausalLM) -> list[list[int]]:
    """Which layers are there, at the beginning of each layer's MLP."""
    seen: list[list[int]] = []
    layers = decoder_layers(of)
    for layer in layers:
        layer.mlp.register_forward_pre_hook(
            lambda *_: seen.append([i for i, each in enumerate(layers) if num_bytes(each.parameters())])
        )
    return seen


def test_two_layers_are_there_and_results_are_equal() -> None:
    """Bugs: layers that stay, so that the model must fit after all; the next one asked for when it is needed; what is
    outside of the layers emptied."""
    whole, own = model(), model()
    stream = LayerStream(own, "cpu")
    outside = num_bytes(stream.outer_parameters())
    seen = watched(own)
    stream.settle()
    assert num_bytes(own.parameters()) == outside
    for _ in range(2):
        assert torch.equal(logits(own), logits(whole))
    # The first one is there for the next pass already.
    assert seen == [[0, 1], [1, 2], [2, 3], [0, 3]] * 2
    stream.free_prefetched()
    assert num_bytes(own.parameters()) == outside
    assert torch.equal(logits(own), logits(whole))


def test_a_pass_that_fails_leaves_nothing() -> None:
    """Bug: layers of a pass that ended in the middle stay, or the next pass takes them for filled."""
    whole, own = model(), model()
    stream = LayerStream(own, "cpu")
    outside = num_bytes(stream.outer_parameters())
    stream.settle()

    def fail(*_: Any) -> None:
        raise KeyError

    handle = decoder_layers(own)[2].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        logits(own)
    stream.free_prefetched()
    assert num_bytes(own.parameters()) == outside
    handle.remove()
    assert torch.equal(logits(own), logits(whole))


def sharded_logits(_: None) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Logits of the model sharded, and of the same with layers that come and go."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole, own = model(), model()
    for each in (whole, own):
        shard(each, mesh, compute_dtype=torch.float32)
    stream = LayerStream(own, "cpu")
    outside = sum(local(each).nbytes for each in stream.outer_parameters())
    seen = watched_shards(own)
    stream.settle()
    found = torch.stack([logits(own), logits(own)])
    stream.free_prefetched()
    for unit in (*decoder_layers(own), own):
        unit.reshard()  # type: ignore[operator]
    assert num_bytes(stream.outer_parameters()) >= outside
    return logits(whole), found, seen


def watched_shards(of: LlamaForCausalLM) -> list[list[int]]:
    """As `watched`, of the shards, in whose place FSDP2 puts whole parameters meanwhile."""
    shards = [[local(each) for each in layer.parameters()] for layer in decoder_layers(of)]
    seen: list[list[int]] = []
    for layer in decoder_layers(of):
        layer.mlp.register_forward_pre_hook(
            lambda *_: seen.append([i for i, each in enumerate(shards) if num_bytes(each)])
        )
    return seen


def test_shards_of_layers_come_and_go() -> None:
    """Bug: FSDP2 gathers what has not arrived, or what has left."""
    with alone():
        wanted, found, seen = sharded_logits(None)
    assert torch.equal(found, wanted.expand_as(found))
    assert seen == [[0, 1], [1, 2], [2, 3], [0, 3]] * 2


@pytest.mark.world
def test_uneven_shards_of_two_ranks(tmp_path: Path) -> None:
    """Bug: FSDP2 pads a shard when it is first used, after its memory has been freed."""
    for wanted, found, _ in on_ranks(2, sharded_logits, None, tmp_path):
        assert torch.equal(found, wanted.expand_as(found))
