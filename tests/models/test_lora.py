"""Adapters on models of every family: their target layers, initial values and merged weights."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_opd.config.model import Lora, Student
from nemo_opd.distributed.collectives import gathered, local
from nemo_opd.distributed.layout import Layout
from nemo_opd.distributed.process_group import build_mesh
from nemo_opd.errors import ConfigError, ModelError
from nemo_opd.models.lora import Adapters, adapter_parameters
from nemo_opd.models.sharded_load import load_sharded
from tests.composition import compose
from tests.models.families import FAMILIES, save
from tests.models.world import alone, as_rank

IDS = torch.arange(12).view(2, 6)
SEED = 5


@pytest.fixture
def one_rank() -> Iterator[None]:
    with alone():
        yield


def loaded(folder: Path, settings: Lora, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return load_sharded(
        Student(model=str(folder)),
        dtype,
        build_mesh(Layout(dist.get_world_size()), "cpu"),
        key="student.model",
        compute_dtype=dtype,
        device="cpu",
        trainable=True,
        adapters=Adapters(settings, str(folder), SEED),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_read_into_what_adapters_are_beside(
    one_rank: None, family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Bugs: a base weight that is trained or not read bit for bit; adapters not in fp32, or not 0 at the start."""
    folder = save(family, tmp_path)
    model, base = loaded(folder, Lora(rank=3), dtype), AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    parameters: dict[str, Any] = dict(model.named_parameters())
    adapters = dict(adapter_parameters(model))
    for name, parameter in parameters.items():
        assert parameter.requires_grad == (name in adapters), name
        assert parameter.dtype == (torch.float32 if name in adapters else dtype), name
    frozen = {name.replace(".base_layer", ""): tensor for name, tensor in parameters.items() if name not in adapters}
    assert frozen.keys() == dict(base.named_parameters()).keys()
    for name, parameter in base.named_parameters():
        assert torch.equal(gathered(frozen[name]), parameter), name
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, base(input_ids=IDS).logits)
    assert model.state_dict().keys() == adapters.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_layers_are_those_that_peft_means(one_rank: None, family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path)
    oracle = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), LoraConfig(r=3, target_modules="all-linear")
    ).get_base_model()
    expected = {name: parameter.shape for name, parameter in adapter_parameters(oracle)}
    assert {name: parameter.shape for name, parameter in adapter_parameters(loaded(folder, Lora(rank=3)))} == expected


def test_they_start_as_linear_layers_do_and_the_same_on_every_layout(tmp_path: Path) -> None:
    """Bugs: ranks' parts that do not join to the one-rank adapter; two adapters with equal values; a wrong scale."""
    folder = save("llama, tied", tmp_path)
    with alone():
        full = dict(adapter_parameters(loaded(folder, Lora(rank=3))))
    parts: list[dict[str, Tensor]] = []
    for rank in range(2):
        with as_rank(rank, 2):
            model = loaded(folder, Lora(rank=3))
            parts.append({name: local(parameter) for name, parameter in adapter_parameters(model)})
    for name, value in full.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value), name
        bound = 1 / math.sqrt(value.shape[1]) if ".lora_A." in name else 0.0
        assert value.abs().max() <= bound
        assert bool(value.any()) == (bound > 0)
    drawn = [value.detach() for name, value in full.items() if ".lora_A." in name]
    assert len({float(value.sum()) for value in drawn}) == len(drawn)
    spread = torch.cat([value.flatten() * math.sqrt(value.shape[1]) for value in drawn]).std()
    # A uniform distribution on [-1, 1] has this deviation; the sample has over 700 values.
    assert float(spread) == pytest.approx(1 / math.sqrt(3), rel=0.1)


@pytest.mark.parametrize("family", ["llama, tied", "phi, biases", "phi3, fused"])
def test_merged_weights_are_the_sum(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path)
    base, merged = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    adapters = Adapters(Lora(rank=3, alpha=12), str(folder), SEED)
    beside = AutoModelForCausalLM.from_pretrained(folder)
    adapters.attach(beside)
    generator = torch.Generator().manual_seed(1)
    state = {name: torch.randn(parameter.shape, generator=generator) for name, parameter in adapter_parameters(beside)}
    drawn = torch.get_rng_state()
    adapters.merge(state, merged)
    assert torch.equal(torch.get_rng_state(), drawn)  # otherwise a resumed run has other dropout
    weights = dict(merged.named_parameters())
    assert weights.keys() == dict(base.named_parameters()).keys()
    for name, weight in base.named_parameters():
        owner = name.removesuffix(".weight")
        a, b = (state.get(f"{owner}.lora_{side}.default.weight") for side in "AB")
        expected = weight if a is None or b is None else weight + 12 / 3 * b @ a
        torch.testing.assert_close(weights[name], expected, rtol=1e-6, atol=1e-6)
    assert not hasattr(merged, "peft_config")


def test_unknown_targets_are_told_with_those_that_there_are(one_rank: None, tmp_path: Path) -> None:
    folder = save("llama, tied", tmp_path)
    for target in ("query", "lm_head", "embed_tokens", "proj"):
        with pytest.raises(ModelError) as caught:
            loaded(folder, Lora(target_modules=("q_proj", target)))
        assert str(caught.value) == (
            f"student.lora.target_modules=['q_proj', '{target}']: {folder} has no linear layer {target} that can take "
            "an adapter; choose from down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, or all-linear"
        )


def test_targets_may_be_named_by_more_than_their_ends(one_rank: None, tmp_path: Path) -> None:
    targets = ("mlp.up_proj", "model.layers.1.self_attn.q_proj")
    model = loaded(save("llama, tied", tmp_path), Lora(target_modules=targets))
    owners = [name.partition(".lora_A.")[0] for name, _ in adapter_parameters(model) if ".lora_A." in name]
    assert owners == ["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"]


def test_a_quantised_model_is_refused(one_rank: None, tmp_path: Path) -> None:
    folder = save("llama, tied", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(ModelError, match=rf"^student\.lora is set and student\.model={folder} is quantised"):
        Adapters(Lora(), str(folder), SEED).attach(model)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("student.lora.rank=0", "student.lora.rank=0: must be greater than or equal to 1"),
        ("student.lora.dropout=1.0", "student.lora.dropout=1.0: must be less than 1"),
        ("student.lora.targets=q", "student.lora.targets='q': there is no such key; did you mean"),
        ("student.lora={rank:2} student.parallelism.tp=2", "student: lora with parallelism.tp=2"),
    ],
)
def test_settings_that_cannot_be(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(*override.split())
    assert str(caught.value).startswith(message)


def test_an_adapter_folder_tells_its_base(tmp_path: Path) -> None:
    folder = save("llama, tied", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    adapters = Adapters(Lora(rank=3, alpha=12), str(folder), SEED)
    adapters.attach(model)
    state = {name: parameter.detach() for name, parameter in adapter_parameters(model)}
    adapters.save(state, model, tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(folder)
    assert (written["r"], written["lora_alpha"], written["inference_mode"]) == (3, 12, True)
    assert sorted(written["target_modules"]) == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
