"""Context parallelism, apart from torch's ring: which models may use it, and full sequences after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from nemo_opd.config.model import Parallelism, Student
from nemo_opd.distributed.layout import Layout
from nemo_opd.distributed.process_group import build_mesh, context_axis
from nemo_opd.errors import ConfigError, ModelError
from nemo_opd.losses import cross_entropy
from nemo_opd.models.causal_model import HiddenStateModel
from nemo_opd.models.packed_attention import (
    RingAttention,
    check_context_parallel,
    gather_positions,
    use_ring_attention,
)
from nemo_opd.models.sharded_load import load_sharded
from tests.models.families import VOCABULARY, model_of, save
from tests.models.world import as_rank, on_ranks
from tests.packings import packing_of, unpadded

pytestmark = pytest.mark.world

POSITIONS = (torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5]))
"""Each of two ranks gets a run from the front and one from the back, as in torch's ring attention."""
KEY = "student.parallelism.cp"
LENGTHS = (7, 1, 4, 9)
"""Lengths of the sequences in a packed row; ranks read them padded to 12 positions."""


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gathered_on_rank() -> tuple[Tensor, Tensor]:
    """Return the gathered tensor and the gradient of this rank's part."""
    axis = context_axis(build_mesh(Layout(1, 2, 1), "cpu"))
    assert axis is not None
    rank = axis.get_local_rank()
    local = random(3, 8, 5, seed=0)[:, POSITIONS[rank]].requires_grad_()
    gathered = gather_positions(local, POSITIONS[rank], axis)
    gathered.backward(random(3, 8, 5, seed=1 + rank))
    assert local.grad is not None
    return gathered.detach(), local.grad


def test_positions_are_gathered_in_order_and_their_gradients_summed(two_ranks: list[Any]) -> None:
    gradient = random(3, 8, 5, seed=1) + random(3, 8, 5, seed=2)
    for rank, (gathered, local_gradient) in enumerate(results.gathered for results in two_ranks):
        assert torch.equal(gathered, random(3, 8, 5, seed=0))
        torch.testing.assert_close(local_gradient, gradient[:, POSITIONS[rank]], rtol=1e-15, atol=1e-15)


@contextmanager
def gathered_attention(ring: RingAttention, length: int, device: torch.device) -> Iterator[Tensor]:
    """Attend over gathered keys and values in place of the ring, which torch has only for CUDA."""
    rank, attend = ring.axis.get_local_rank(), F.scaled_dot_product_attention
    runs = torch.arange(length, device=device).chunk(2 * ring.axis.size())
    positions = torch.cat([runs[rank], runs[-1 - rank]])

    def gather(part: Tensor) -> Tensor:
        rows = gather_positions(part.transpose(1, 2).flatten(2), positions, ring.axis)
        return rows.unflatten(2, part.shape[1::2]).transpose(1, 2)

    def over_all(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, **options: Any) -> Tensor:
        assert is_causal
        seen = positions.unsqueeze(1) >= torch.arange(length)
        return attend(query, gather(key), gather(value), seen, **options)

    with patch.object(F, "scaled_dot_product_attention", over_all):
        yield positions


def loss_and_gradient(source: HiddenStateModel, embedding: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of packed sequences and this rank's share of the tied embedding's gradient."""
    ids = torch.randint(4, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(3))
    packing = packing_of(*LENGTHS)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)
    output = source(ids, packing)
    leaf = output.cut_off()
    loss = cross_entropy(source.whole(leaf, packing), ids, mask=mask).loss
    loss.backward()
    gradient = leaf.leaves[0].grad
    assert gradient is not None
    source.backward(output, gradient, packing)
    assert embedding.grad is not None
    return loss.detach(), embedding.grad


def learned_on_rank() -> tuple[Tensor, Tensor]:
    mesh, model = build_mesh(Layout(1, 2, 1), "cpu"), model_of("llama, tied")
    use_ring_attention(model, 2, key=KEY)
    with patch.object(RingAttention, "positions", gathered_attention):
        source = HiddenStateModel(model, key=KEY, mesh=mesh, parallelism=Parallelism(cp=2))
        assert not source.reads_packed
        assert source.num_positions(packing_of(*LENGTHS)) == len(LENGTHS) * 12
        return loss_and_gradient(source, model.get_input_embeddings().weight)


def test_packed_sequences_are_learned_as_on_one_rank(two_ranks: list[Any]) -> None:
    """Bugs: a loss reads the ring's padding or another rank's positions; the gradient is counted once per rank."""
    model = model_of("llama, tied")
    loss, gradient = loss_and_gradient(HiddenStateModel(model, key=KEY), model.get_input_embeddings().weight)
    for rank_loss, _ in (results.learned for results in two_ranks):
        torch.testing.assert_close(rank_loss, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sum(results.learned[1] for results in two_ranks), gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["llama, tied", "qwen3, norms of heads", "phi, biases"])
def test_the_attention_that_a_ring_replaces_is_the_models_own(family: str) -> None:
    ids = torch.arange(20).view(2, 10)
    model = model_of(family)
    expected = model(input_ids=ids).logits
    use_ring_attention(model, 2, key=KEY)
    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_who_cannot_use_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^student\.parallelism\.cp=2: needs a GPU.* set it to 1 for device=cpu"):
        check_context_parallel(2, "cpu", key=KEY)
    check_context_parallel(1, "cpu", key=KEY)
    with pytest.raises(ModelError, match=r"cp=2: Gemma3ForCausalLM has layers with sliding_attention"):
        use_ring_attention(model_of("gemma3, two rotary embeddings"), 2, key=KEY)
    with pytest.raises(ModelError, match=r"cp=2: Gemma2ForCausalLM has a soft-cap in its attention"):
        use_ring_attention(model_of("gemma2, soft-cap"), 2, key=KEY)
    with as_rank(0, 2), pytest.raises(ConfigError, match="needs a GPU"):
        load_sharded(
            Student(model=str(save("llama, tied", tmp_path)), parallelism=Parallelism(cp=2)),
            torch.float32,
            build_mesh(Layout(1, 2, 1), "cpu"),
            key="student.model",
            compute_dtype=torch.float32,
            device="cpu",
            trainable=True,
        )


def hidden_states_on_rank(folder: Path) -> tuple[Tensor, Tensor]:
    """Return hidden states of odd length and the embedding's gradient, on one of two GPUs."""
    rank = torch.distributed.get_rank()
    torch.cuda.set_device(rank)
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group(
        "nccl", store=torch.distributed.FileStore(str(folder / "nccl"), 2), rank=rank, world_size=2
    )
    parallelism = Parallelism(cp=2)
    mesh = build_mesh(Layout(1, 2, 1), "cuda")
    model = load_sharded(
        Student(model=str(folder / "llama"), parallelism=parallelism),
        torch.float32,
        mesh,
        key="student.model",
        compute_dtype=torch.float32,
        device="cuda",
        trainable=True,
    )
    source = HiddenStateModel(model, key="student.model", mesh=mesh, parallelism=parallelism)
    ids = torch.arange(22, device="cuda").view(2, 11)
    packing = unpadded(ids).to("cuda")
    output = source(ids, packing)
    gradient = random(*output.hidden.shape, seed=0).to(output.hidden)
    # Each rank has half of the sum, and FSDP2 takes the mean over both.
    source.backward(output, gradient if rank == 0 else gradient.zero_(), packing)
    embedding: torch.distributed.tensor.DTensor = model.get_input_embeddings().weight.grad
    return output.hidden.detach().view(2, 11, -1).cpu(), 2 * embedding.full_tensor().cpu()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_share_a_sequence(tmp_path: Path) -> None:
    folder = save("llama, tied", tmp_path)
    model = LlamaForCausalLM.from_pretrained(folder)
    hidden = model.model(input_ids=torch.arange(22).view(2, 11)).last_hidden_state
    hidden.backward(random(*hidden.shape, seed=0).to(hidden))
    for rank_hidden, gradient in on_ranks(2, hidden_states_on_rank, folder.parent, tmp_path):
        torch.testing.assert_close(rank_hidden, hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradient, model.get_input_embeddings().weight.grad, rtol=1e-3, atol=1e-3)
