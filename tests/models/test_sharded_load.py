"""Weights read piece by piece equal those that transformers loads, and a rank's memory stays near its shard's size."""

import ctypes
import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from nemo_opd.config.model import Parallelism, Student
from nemo_opd.distributed.collectives import gathered
from nemo_opd.distributed.layout import Layout
from nemo_opd.distributed.process_group import build_mesh
from nemo_opd.errors import ModelError
from nemo_opd.models import sharded_load
from nemo_opd.models.load import load_model
from nemo_opd.models.parallelize import parallelize
from nemo_opd.models.sharded_load import load_sharded
from tests.models.families import FAMILIES, MIXED, MIXTURES, SIZES, save
from tests.models.world import alone, as_rank, on_ranks

pytestmark = pytest.mark.world

IDS = torch.arange(12).view(2, 6)


@pytest.fixture
def one_rank() -> Iterator[None]:
    with alone():
        yield


def loaded(folder: Path, dtype: torch.dtype = torch.float32, parallelism: Parallelism | None = None) -> PreTrainedModel:
    parallelism = parallelism or Parallelism()
    layout = Layout(dist.get_world_size() // parallelism.tp, 1, parallelism.tp)
    return load_sharded(
        Student(model=str(folder), parallelism=parallelism),
        dtype,
        build_mesh(layout, "cpu"),
        key="student.model",
        compute_dtype=dtype,
        device="cpu",
        trainable=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES | MIXTURES)
def test_everything_is_what_transformers_loads(
    one_rank: None, family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches any bit that differs, also in rotary frequencies and other buffers that files do not have."""
    monkeypatch.setattr(sharded_load, "load_model", lambda *_, **__: pytest.fail("the weights were loaded whole"))
    folder = save(family, tmp_path)
    model, expected = loaded(folder, dtype), AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == dict(expected.named_parameters()).keys()
    for name, parameter in expected.named_parameters():
        actual: Any = parameters[name]
        assert actual.dtype == dtype
        assert torch.equal(gathered(actual), parameter), name
    buffers = dict(model.named_buffers())
    assert buffers.keys() == dict(expected.named_buffers()).keys()
    for name, buffer in expected.named_buffers():
        assert buffers[name].dtype == buffer.dtype
        assert torch.equal(buffers[name], buffer), name
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, expected(input_ids=IDS).logits)
    assert model.generation_config == expected.generation_config


@pytest.mark.parametrize("family", ["llama, tied", "qwen2, biases", "phi3, fused", *MIXED])
def test_every_rank_reads_the_part_that_torch_would_give_it(family: str, tmp_path: Path) -> None:
    """Catches a shard with other rows than torch's, on 2 × 2 ranks and with a vocabulary that 2 does not divide.

    torch cuts the full model; we read parts of files.
    """
    folder = save(family, tmp_path)
    for rank in range(4):
        with as_rank(rank, 4):
            model = loaded(folder, parallelism=Parallelism(tp=2))
            expected_model = load_model(str(folder), torch.float32, key="student.model")
            mesh = build_mesh(Layout(2, 1, 2), "cpu")
            parallelize(expected_model, mesh, Parallelism(tp=2), compute_dtype=torch.float32, key="student")
            for (name, actual), expected in zip(model.named_parameters(), expected_model.parameters(), strict=True):
                assert isinstance(actual, DTensor)
                assert isinstance(expected, DTensor)
                assert actual.placements == expected.placements
                assert torch.equal(actual.to_local(), expected.to_local()), name


def change(folder: Path, name: str, tensor: Tensor | None) -> None:
    """Replace a tensor of the folder, or delete it if `tensor` is None."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            del tensors[name]
            save_file(tensors | ({} if tensor is None else {name: tensor}), file, {"format": "pt"})


def test_missing_weights_and_weights_of_another_shape(one_rank: None, tmp_path: Path) -> None:
    folder = save("qwen3, norms of heads", tmp_path)
    change(folder, "model.layers.1.self_attn.q_norm.weight", torch.ones(9))
    with pytest.raises(ModelError, match=rf"^student.model={folder}: the weights could not be loaded \(.*\[9\]"):
        loaded(folder)
    change(folder, "model.layers.1.self_attn.q_norm.weight", None)
    with pytest.raises(ModelError, match=r"missing \(model\.layers\.1\.self_attn\.q_norm\.weight\)"):
        loaded(folder)


def test_an_expert_is_missing_or_of_another_shape(one_rank: None, tmp_path: Path) -> None:
    """Bug: the experts after a missing one move up, so tokens reach other experts than in training."""
    folder, name = save("mixtral, all layers", tmp_path), "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    change(folder, name, torch.ones(24, 17))
    with pytest.raises(ModelError, match=rf"could not be loaded \({name} is \[24, 17\], the model has \[4, 48, 16\]"):
        loaded(folder)
    change(folder, name, None)
    with pytest.raises(ModelError, match=r"missing \(model\.layers\.1\.mlp\.experts\.gate_up_proj\)"):
        loaded(folder)


def test_a_base_model_is_read_by_its_own_names(one_rank: None, tmp_path: Path) -> None:
    """Catches a base model's names without their prefix, and a tied head, which files do not have."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    model.model.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    head: Any = loaded(tmp_path).get_output_embeddings()
    assert torch.equal(gathered(head.weight), model.lm_head.weight)


def test_weights_that_are_read_whole(one_rank: None, tmp_path: Path) -> None:
    """Bugs: two different tied weights in a file become one, unlike in transformers; the .bin format is not read."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    (tmp_path / "two").mkdir()
    model.save_pretrained(tmp_path / "two")
    tensors = load_file(tmp_path / "two/model.safetensors")
    head = torch.randn(model.lm_head.weight.shape)
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "two/model.safetensors", {"format": "pt"})
    loaded_head: Any = loaded(tmp_path / "two").get_output_embeddings()
    assert torch.equal(gathered(loaded_head.weight), head)
    (tmp_path / "old").mkdir()
    model.config.save_pretrained(tmp_path / "old")
    torch.save(model.state_dict(), tmp_path / "old/pytorch_model.bin")
    loaded_head = loaded(tmp_path / "old").get_output_embeddings()
    assert torch.equal(gathered(loaded_head.weight), model.lm_head.weight)


MIB = 2**20
LARGE = LlamaConfig(
    vocab_size=10_000,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
"""137 MiB; the largest tensor has 20."""
LARGE_MIXTURE = Qwen3MoeConfig(
    vocab_size=1000,
    hidden_size=512,
    moe_intermediate_size=512,
    num_experts=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
"""109 MiB; the stacked experts have up to 32 for each parameter, and up to 2 for each tensor of a file."""


def anonymous_memory() -> int:
    """Return the process's memory in bytes, without pages of mapped files."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


class Peak:
    """The largest memory in bytes above its value at the start, sampled about a thousand times a second."""

    def __enter__(self) -> "Peak":
        self.bytes = self.baseline = anonymous_memory()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._is_over.wait(0.001):
            self.bytes = max(self.bytes, anonymous_memory())

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.bytes = max(self.bytes, anonymous_memory()) - self.baseline


@dataclass(frozen=True)
class Memory:
    """Bytes for each layout: the peak while loading, and the rank's shard."""

    peak: list[int]
    shard: list[int]


def save_large(folder: Path) -> dict[str, Path]:
    """Save a dense model and a mixture of experts; return their folders, keyed by name."""
    folders = {}
    for name, config in (("dense", LARGE), ("mixture", LARGE_MIXTURE)):
        model = on_meta(config).to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        model.save_pretrained(folder / name, max_shard_size="50MB")
        folders[name] = folder / name
    return folders


def on_meta(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def memory_on_rank(folder: Path) -> Memory:
    memory = Memory([], [])
    for parallelism in (Parallelism(tp=2), Parallelism()):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # otherwise reuse of freed memory does not show
        with Peak() as peak:
            model = loaded(folder, parallelism=parallelism)
        parameters: Any = list(model.parameters())
        memory.peak.append(peak.bytes)
        memory.shard.append(sum(parameter.to_local().nbytes for parameter in parameters))
        del model, parameters
    return memory


@pytest.mark.parametrize(
    ("name", "config", "largest"), [("dense", LARGE, 20 * MIB), ("mixture", LARGE_MIXTURE, 2 * MIB)]
)
def test_a_rank_holds_its_shard_and_one_tensor(
    two_ranks: list[Any], name: str, config: PretrainedConfig, largest: int
) -> None:
    """Bug: a rank reads full tensors, or all experts of a layer, before it takes its part."""
    total = sum(parameter.nbytes for parameter in on_meta(config).parameters())
    slack = 12 * MIB  # for Python's and torch's modules, operator tables and pools
    for rank in two_ranks:
        for peak, shard in zip(rank.memory[name].peak, rank.memory[name].shard, strict=True):
            assert shard <= total / 2 + MIB
            assert shard / 2 < peak <= shard + largest + slack < total, (peak / MIB, shard / MIB)


def save_not_finite(folder: Path, value: float, row: int) -> Path:
    """Save a model with two values that are not finite."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[row, 2] = value
        model.model.norm.weight[0] = value
    model.save_pretrained(folder)
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as refused:
        loaded(folder)
    return str(refused.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(one_rank: None, value: float, tmp_path: Path) -> None:
    """Bug: the advice for a teacher with NaN is handoff=logits, which destroys the student."""
    folder = save_not_finite(tmp_path / "model", value, row=0)
    assert refusal(folder).startswith(
        f"student.model={folder}: model.layers.1.mlp.up_proj.weight has 1 of 384 values that are not finite (and so "
        "has 1 other tensor) in float32"
    )


def test_weights_that_overflow_in_float16_are_told_so(one_rank: None, tmp_path: Path) -> None:
    folder = save_not_finite(tmp_path / "model", 7e4, row=0)
    loaded(folder)
    with pytest.raises(ModelError, match=r"not finite.*in float16, .*; float16 overflows at 65,504, so try student"):
        loaded(folder, torch.float16)


def test_all_ranks_refuse_what_one_of_them_has(tmp_path: Path) -> None:
    """Bug: one rank refuses its shard, and the other rank waits for it in the first collective."""
    folder = save_not_finite(tmp_path / "model", float("nan"), row=-1)
    first, second = on_ranks(2, refusal, folder, tmp_path / "ranks")
    assert first == second
    assert "up_proj.weight has 1 of 384 values" in first
