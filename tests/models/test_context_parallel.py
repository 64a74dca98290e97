"""What is ours of context parallelism: who may use it, and whole sequences again after it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from nemo_opd.config.parallelism import Parallelism
from nemo_opd.distributed.layout import Layout
from nemo_opd.distributed.mesh import build_mesh, context_axis
from nemo_opd.errors import ConfigError, ModelError
from nemo_opd.models.context_parallel import (
    check_context_parallel,
    gather_positions,
    use_ring_attention,
)
from nemo_opd.models.head import Headless
from nemo_opd.models.sharded_load import load_sharded
from tests.models.families import model_of, save
from tests.models.world import as_rank, on_ranks
from tests.packings import unpadded

pytestmark = pytest.mark.world

POSITIONS = (torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5]))
"""Of two ranks: from the front and from the back, as torch's ring attention deals them out."""
KEY = "student.parallelism.cp"


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gathered_on_rank() -> tuple[Tensor, Tensor]:
    """What a rank gets, and the gradient of what it gave."""
    axis = context_axis(build_mesh(Layout(1, 2, 1), "cpu"))
    assert axis is not None
    rank = axis.get_local_rank()
    local = random(3, 8, 5, seed=0)[:, POSITIONS[rank]].requires_grad_()
    whole = gather_positions(local, POSITIONS[rank], axis)
    whole.backward(random(3, 8, 5, seed=1 + rank))
    assert local.grad is not None
    return whole.detach(), local.grad


def test_positions_are_gathered_in_order_and_their_gradients_summed(two_ranks: list[Any]) -> None:
    gradient = random(3, 8, 5, seed=1) + random(3, 8, 5, seed=2)
    for rank, (whole, found) in enumerate(each.gathered for each in two_ranks):
        assert torch.equal(whole, random(3, 8, 5, seed=0))
        torch.testing.assert_close(found, gradient[:, POSITIONS[rank]], rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("family", ["llama, tied", "qwen3, norms of heads", "phi, biases"])
def test_the_attention_that_a_ring_replaces_is_the_models_own(family: str) -> None:
    ids = torch.arange(20).view(2, 10)
    model = model_of(family)
    expected = model(input_ids=ids).logits
    use_ring_attention(model, 2, key=KEY)
    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_who_cannot_use_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^student\.parallelism\.cp=2: needs a GPU.* set it to 1 where device=cpu"):
        check_context_parallel(2, "cpu", key=KEY)
    check_context_parallel(1, "cpu", key=KEY)
    with pytest.raises(ModelError, match=r"cp=2: Gemma3ForCausalLM has layers with sliding_attention"):
        use_ring_attention(model_of("gemma3, two rotary embeddings"), 2, key=KEY)
    with pytest.raises(ModelError, match=r"cp=2: Gemma2ForCausalLM has a soft-cap in its attention"):
        use_ring_attention(model_of("gemma2, soft-cap"), 2, key=KEY)
    with as_rank(0, 2), pytest.raises(ConfigError, match="needs a GPU"):
        load_sharded(
            str(save("llama, tied", tmp_path)),
            torch.float32,
            build_mesh(Layout(1, 2, 1), "cpu"),
            key="student.model",
            parallelism=Parallelism(cp=2),
            compute_dtype=torch.float32,
            device="cpu",
            trainable=True,
        )


def hidden_states_on_rank(folder: Path) -> tuple[Tensor, Tensor]:
    """On two GPUs: hidden states of odd length, and the gradient of an embedding."""
    rank = torch.distributed.get_rank()
    torch.cuda.set_device(rank)
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group(
        "nccl", store=torch.distributed.FileStore(str(folder / "nccl"), 2), rank=rank, world_size=2
    )
    parallelism = Parallelism(cp=2)
    mesh = build_mesh(Layout(1, 2, 1), "cuda")
    model = load_sharded(
        str(folder / "llama"),
        torch.float32,
        mesh,
        key="student.model",
        parallelism=parallelism,
        compute_dtype=torch.float32,
        device="cuda",
        trainable=True,
    )
    headless = Headless(model, key="student.model", mesh=mesh, parallelism=parallelism)
    ids = torch.arange(22, device="cuda").view(2, 11)
    packing = unpadded(ids).to("cuda")
    made = headless(ids, packing)
    gradient = random(*made.hidden.shape, seed=0).to(made.hidden)
    # Each rank has half of the sum, and FSDP2 takes the mean over both.
    headless.backward(made, gradient if rank == 0 else gradient.zero_(), packing)
    embedding: torch.distributed.tensor.DTensor = model.get_input_embeddings().weight.grad
    return made.hidden.detach().view(2, 11, -1).cpu(), 2 * embedding.full_tensor().cpu()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_share_a_sequence(tmp_path: Path) -> None:
    folder = save("llama, tied", tmp_path)
    model = LlamaForCausalLM.from_pretrained(folder)
    hidden = model.model(input_ids=torch.arange(22).view(2, 11)).last_hidden_state
    hidden.backward(random(*hidden.shape, seed=0).to(hidden))
    for found, gradient in on_ranks(2, hidden_states_on_rank, folder.parent, tmp_path):
        torch.testing.assert_close(found, hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradient, model.get_input_embeddings().weight.grad, rtol=1e-3, atol=1e-3)
