"""Estimated activations against tensors that autograd saves, and exact counts of parameters, also with adapters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nemo_opd.config.model import Lora, Student
from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ModelError
from nemo_opd.kernels import launch
from nemo_opd.models.fused_layers import replace_parts
from nemo_opd.models.lora import Adapters
from nemo_opd.models.parallelize import checkpoint_activations, shard
from nemo_opd.preflight.memory import Machine, MemoryInputs, ModelSetup, Phase, Rank, estimate
from nemo_opd.preflight.model_info import ModelSize, model_size, numel, shard_numel
from tests.composition import compose
from tests.models.world import as_rank

TINY = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**TINY),
    "llama, wide": LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1536, num_hidden_layers=3, num_attention_heads=8
    ),
    "qwen2": Qwen2Config(**TINY),
    "qwen3": Qwen3Config(**TINY),
    "gemma2": Gemma2Config(**TINY, sliding_window=32),
    "gemma3": Gemma3TextConfig(**TINY, sliding_window=32),
    "phi3": Phi3Config(**{**TINY, "head_dim": 16}),
    "phi3, no shared keys": Phi3Config(**{**TINY, "head_dim": 16, "num_key_value_heads": 4}),
    "olmo2": Olmo2Config(**{**TINY, "head_dim": 16}),
}
ROWS, LENGTH = 2, 96
MARGIN = 0.15
"""Relative error that the formula of activations promises."""


@dataclass
class SavedTensors:
    """Storages that autograd saves, each once, without the parameters."""

    model: Any

    def __post_init__(self) -> None:
        self.storages: dict[int, int] = {}
        self.alive: list[Tensor] = []
        """Keeps tensors alive, so that no address is used twice."""
        self.parameters = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.parameters:
            self.storages[storage.data_ptr()] = storage.nbytes()
            self.alive.append(tensor)
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(self.storages.values())


def measured(
    config: PretrainedConfig,
    dtype: torch.dtype = torch.float32,
    *,
    checkpointing: bool = False,
    is_fused: bool = False,
    adapters: Adapters | None = None,
) -> int:
    """Return the bytes that a forward pass saves, with the hidden states that the head reads."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).to(dtype).train()
    if adapters is not None:
        adapters.attach(model)
    if is_fused:
        replace_parts(model)
    if checkpointing:
        checkpoint_activations(model)
    saved_tensors = SavedTensors(model)
    ids = torch.randint(0, 100, (ROWS, LENGTH))
    with saved_tensors_hooks(saved_tensors.pack, lambda tensor: tensor):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    saved_tensors.pack(hidden)
    return saved_tensors.num_bytes


def rank_of(size: ModelSize, dtype: str = "bfloat16", *, is_fused: bool = False, **parallelism: Any) -> Rank:
    student = Student.model_validate({"model": "m", "dtype": dtype, "parallelism": parallelism})
    rank = Rank(
        student, ModelSetup(size, size.vocab_size, Layout(1, student.parallelism.cp, student.parallelism.tp)), "cpu"
    )
    rank.is_fused = is_fused
    return rank


def saved(size: ModelSize, dtype: str = "bfloat16", *, checkpointing: bool = False, is_fused: bool = False) -> int:
    return rank_of(size, dtype, is_fused=is_fused).saved(ROWS * LENGTH, LENGTH, checkpointing=checkpointing)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_saved_activations(name: str, dtype: torch.dtype, checkpointing: bool) -> None:
    """Catches a formula without the tensors of a norm, an attention kernel or an MLP."""
    config = CONFIGS[name]
    expected = measured(config, dtype, checkpointing=checkpointing)
    estimated = saved(model_size(config), str(dtype).removeprefix("torch."), checkpointing=checkpointing)

    # In bf16 a norm saves 6 bytes per number in Llama and 8 in Gemma; the formula has 8. It leaves out masks, keys
    # repeated for each query under them, and the whole outputs of fused matrices.
    assert estimated == pytest.approx(expected, rel=MARGIN)


@pytest.mark.parametrize("name", ["llama", "llama, wide", "qwen2", "qwen3", "phi3"])
def test_saved_activations_of_kernels(name: str) -> None:
    """The kernels do not run: the code around them saves the tensors."""
    pytest.importorskip("triton")
    with patch.object(launch, "is_supported", lambda _: True), patch.object(launch, "launch", lambda *_, **__: None):
        expected = measured(CONFIGS[name], torch.bfloat16, checkpointing=False, is_fused=True)
    size = model_size(CONFIGS[name])

    assert all(layer.is_known for layer in size.layers)
    assert saved(size, is_fused=True) == pytest.approx(expected, rel=MARGIN)
    assert saved(size, is_fused=True) < saved(size)


def test_gemma_saves_the_same_with_and_without_kernels() -> None:
    size = model_size(CONFIGS["gemma2"])
    assert saved(size, is_fused=True) == saved(size)


def test_parallel_ranks_save_their_share() -> None:
    """Bug: tp divides more than heads and MLP, sequence parallelism more than also norms, or cp more than tokens."""
    size = model_size(CONFIGS["llama"])
    tokens, width, heads, keys, mlp = ROWS * LENGTH, 64, 96, 48, 176
    read_by_linear, norms = 2 * width * 2, 2 * width * 8
    inside = (2 * heads + 2 * keys + 3 * mlp) * 2 * 5 // 4
    assert rank_of(size).layer_bytes(size.layers[0], tokens, LENGTH) == tokens * (read_by_linear + norms + inside)

    def parallel(sequence_parallel: bool) -> int:
        rank = rank_of(size, tp=2, sequence_parallel=sequence_parallel)
        return rank.layer_bytes(size.layers[0], tokens, LENGTH, rank.sp)

    assert parallel(False) == tokens * (read_by_linear + norms + inside // 2)
    assert parallel(True) == tokens * (read_by_linear + (norms + inside) // 2)
    assert rank_of(size, cp=2).tokens(ROWS, LENGTH) == tokens // 2


def test_eager_attention_saves_every_score() -> None:
    """Gemma-2 caps its scores, so it is always eager: S² per head, in the softmax and in the tanh."""
    size = model_size(CONFIGS["gemma2"])
    rank = rank_of(size, "float32")
    short, long = (rank.layer_bytes(size.layers[0], ROWS * length, length) for length in (512, 1024))

    squares = ROWS * 4 * (1024**2 - 2 * 512**2) * (4 + 4)
    assert long - 2 * short == squares


def test_a_mixture_of_experts() -> None:
    """Bug: activations count all experts, or parameters only the routed ones."""
    config = Qwen3MoeConfig(**TINY, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2)
    size = model_size(config)
    model = AutoModelForCausalLM.from_config(config)

    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert size.layers[0].num_experts == 2


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "mamba", "mixtral", "deepseek_v3", "qwen3_next", "cohere2"])
def test_any_causal_model_has_a_size(kind: str) -> None:
    """Bug: an error for an architecture that the formulas do not cover; a rough estimate is enough."""
    settings = {"num_attention_heads": 4} if kind == "gpt2" else {}
    config = AutoConfig.for_model(kind, num_hidden_layers=2, hidden_size=64, vocab_size=100, **settings)
    size = model_size(config)

    assert size.parameters > 0
    assert saved(size) > saved(size, checkpointing=True)


@pytest.fixture
def three_ranks() -> Iterator[None]:
    """Rank 0 of three, whose collectives do nothing."""
    with as_rank(0, 3):
        yield


@pytest.mark.usefixtures("three_ranks")
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "phi3"])
def test_parameters_gradients_and_optimizer_are_exact(name: str) -> None:
    """Catches wrong shards if rows do not divide by the ranks, or if the head is the embedding."""
    config = CONFIGS[name]
    model: Any = AutoModelForCausalLM.from_config(config)
    size = model_size(config)
    assert numel(size.shapes) == sum(parameter.numel() for parameter in model.parameters())

    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    shard(model, mesh, compute_dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False).logits.sum().backward()
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    gradients = [parameter.grad for parameter in model.parameters()]
    expected = shard_numel(size.shapes, Layout(3))

    assert local_numel(list(model.parameters())) == expected
    assert local_numel(gradients) == expected
    assert local_numel(moments) == 2 * expected


def local_numel(tensors: Sequence[Any]) -> int:
    return sum(tensor.to_local().numel() for tensor in tensors)


# Adapters


def adapted(**settings: object) -> Adapters:
    return Adapters(Lora.model_validate(settings), "base", 0)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_adapters_have_the_parameters_that_peft_trains(targets: str | list[str]) -> None:
    config = CONFIGS["llama, wide"]
    size = model_size(config, adapted(rank=8, target_modules=targets))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        peft = get_peft_model(model, LoraConfig(r=8, target_modules=targets))
    trained, total = peft.get_nb_trainable_parameters()
    assert numel(size.trained_shapes) == trained
    assert size.parameters == total - trained
    assert sum(numel(layer.trained_shapes) for layer in size.layers) == trained


def test_missing_target_modules_are_refused() -> None:
    with pytest.raises(ModelError, match="has no linear layer query"):
        model_size(CONFIGS["llama, wide"], adapted(target_modules=["query"]))


def test_only_adapters_have_gradients_and_moments() -> None:
    config = compose("train.max_length=512", "student.dtype=bfloat16").model_copy(update={"teachers": ()})
    size = model_size(CONFIGS["llama, wide"], adapted(rank=8))
    inputs = MemoryInputs(ModelSetup(size, size.vocab_size, Layout(1)), (), Machine("cuda", 80 * 2**30, None, 1))
    parts = {part.name: part.at(Phase.BACKWARD) for part in estimate(config, inputs).memories[0].parts}
    trained = numel(size.trained_shapes)
    assert parts["parameters"] == 2 * size.parameters + 4 * trained
    assert parts["optimizer"] == 8 * trained
    assert parts["gradients"] == 4 * trained
    assert parts["gradients of hidden states and head"] == config.train.longest_at_a_time(1) * 512 * 512 * 2


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_saved_activations_of_adapters(dropout: float) -> None:
    """Autograd saves a little less: norms with frozen weights save less than the formula says."""
    config = LlamaConfig(
        vocab_size=120, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    adapters = adapted(rank=16, dropout=dropout)
    assert saved(model_size(config, adapters), "float32") == pytest.approx(measured(config, adapters=adapters), rel=0.2)
