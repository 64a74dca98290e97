"""A model that loads its layers one after another has the same results, with at most two layers in memory.

The host stands for the device, as in test_residence.py: its storages are emptied and filled in the same way.
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
    llama = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 4, "intermediate_size": 25}))
    return llama.eval().requires_grad_(False)


def num_bytes(tensors: Any) -> int:
    return sum(storage.nbytes() for storage in storages_of(tensors))


def logits(model: LlamaForCausalLM) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def watched(model: LlamaForCausalLM) -> list[list[int]]:
    """Return a list that gets the layers in memory at the beginning of each layer's MLP."""
    seen: list[list[int]] = []
    layers = decoder_layers(model)
    for layer in layers:
        layer.mlp.register_forward_pre_hook(
            lambda *_: seen.append([i for i, layer in enumerate(layers) if num_bytes(layer.parameters())])
        )
    return seen


def test_two_layers_are_in_memory_and_results_are_equal() -> None:
    """Bugs: layers stay, so the full model must fit; the next layer is not prefetched; other parameters are emptied."""
    resident, streamed = model(), model()
    stream = LayerStream(streamed, "cpu")
    outside = num_bytes(stream.outer_parameters())
    seen = watched(streamed)
    stream.settle()
    assert num_bytes(streamed.parameters()) == outside
    for _ in range(2):
        assert torch.equal(logits(streamed), logits(resident))
    # The first layer is already in memory for the next pass.
    assert seen == [[0, 1], [1, 2], [2, 3], [0, 3]] * 2
    stream.free_prefetched()
    assert num_bytes(streamed.parameters()) == outside
    assert torch.equal(logits(streamed), logits(resident))


def test_a_pass_that_fails_leaves_no_layers() -> None:
    """Bug: layers stay after a pass that failed, or the next pass takes empty layers for filled."""
    resident, streamed = model(), model()
    stream = LayerStream(streamed, "cpu")
    outside = num_bytes(stream.outer_parameters())
    stream.settle()

    def fail(*_: Any) -> None:
        raise KeyError

    handle = decoder_layers(streamed)[2].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        logits(streamed)
    stream.free_prefetched()
    assert num_bytes(streamed.parameters()) == outside
    handle.remove()
    assert torch.equal(logits(streamed), logits(resident))


def sharded_logits(_: None) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Return logits of a sharded model, of the same model with streamed layers, and its layers in memory."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    resident, streamed = model(), model()
    for llama in (resident, streamed):
        shard(llama, mesh, compute_dtype=torch.float32)
    stream = LayerStream(streamed, "cpu")
    outside = sum(local(parameter).nbytes for parameter in stream.outer_parameters())
    seen = watched_shards(streamed)
    stream.settle()
    streamed_logits = torch.stack([logits(streamed), logits(streamed)])
    stream.free_prefetched()
    for unit in (*decoder_layers(streamed), streamed):
        unit.reshard()  # type: ignore[operator]
    assert num_bytes(stream.outer_parameters()) >= outside
    return logits(resident), streamed_logits, seen


def watched_shards(model: LlamaForCausalLM) -> list[list[int]]:
    """Like `watched`, for the shards: during the pass FSDP2 replaces parameters by full ones."""
    shards = [[local(parameter) for parameter in layer.parameters()] for layer in decoder_layers(model)]
    seen: list[list[int]] = []
    for layer in decoder_layers(model):
        layer.mlp.register_forward_pre_hook(
            lambda *_: seen.append([i for i, shard in enumerate(shards) if num_bytes(shard)])
        )
    return seen


def test_shards_of_layers_come_and_go() -> None:
    """Bug: FSDP2 gathers shards that have not arrived or were already freed."""
    with alone():
        expected, streamed_logits, seen = sharded_logits(None)
    assert torch.equal(streamed_logits, expected.expand_as(streamed_logits))
    assert seen == [[0, 1], [1, 2], [2, 3], [0, 3]] * 2


@pytest.mark.world
def test_uneven_shards_of_two_ranks(tmp_path: Path) -> None:
    """Bug: FSDP2 pads a shard at its first use, after its memory was freed."""
    for expected, streamed_logits, _ in on_ranks(2, sharded_logits, None, tmp_path):
        assert torch.equal(streamed_logits, expected.expand_as(streamed_logits))
