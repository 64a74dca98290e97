"""Tensor-parallel plans: a model that cannot be cut is refused with the size at fault and the tp that would work."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from nemo_opd.config.model import Parallelism
from nemo_opd.errors import ModelError
from nemo_opd.models.tensor_plan import Style, tensor_plan
from tests.models.families import FAMILIES, MIXTURES, SIZES

KEY = "student.parallelism.tp"


def on_meta(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_a_layer_is_cut(family: str) -> None:
    model = on_meta(FAMILIES[family])
    plan = tensor_plan(model, 2, sequence_parallel=True, key=KEY)
    linears = {
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and "layers." in name
    }
    assert linears <= plan.styles.keys()
    assert plan.layers == ("model.layers.0", "model.layers.1")
    assert len(plan.blocks) == 4


def test_norms_of_heads_are_found_where_the_plan_does_not_name_them() -> None:
    """Bug: a rank's gradient of such a norm covers only its own heads."""
    plan = tensor_plan(on_meta(FAMILIES["phi, biases"]), 2, sequence_parallel=False, key=KEY)
    assert plan.styles["model.layers.1.self_attn.q_layernorm"] is Style.PER_HEAD
    olmo_plan = tensor_plan(on_meta(FAMILIES["olmo2, norms of all heads"]), 2, sequence_parallel=False, key=KEY)
    assert "model.layers.1.self_attn.q_norm" not in olmo_plan.styles


@pytest.mark.parametrize(
    ("change", "tp", "message"),
    [
        ({}, 4, r"=4: num_key_value_heads=2 of LlamaForCausalLM cannot be cut into 4 .*; set it to one of: 1, 2$"),
        (
            {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 6},
            4,
            r"num_attention_heads=6 .* 1, 2, 3, 6$",
        ),
        ({"intermediate_size": 25}, 2, r"mlp\.gate_proj\.out_features=25 .*: 1$"),
    ],
)
def test_sizes_that_cannot_be_cut(change: dict[str, int], tp: int, message: str) -> None:
    model = on_meta(LlamaConfig(**{**SIZES, **change}))
    with pytest.raises(ModelError, match=rf"^student\.parallelism\.tp.*{message}"):
        tensor_plan(model, tp, sequence_parallel=False, key=KEY)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (LlamaConfig(**SIZES), 2),
        (LlamaConfig(**{**SIZES, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 6}), 6),
        (LlamaConfig(**{**SIZES, "intermediate_size": 25}), 1),
        (MIXTURES["mixtral, all layers"], 2),
        (GPT2Config(n_layer=1, n_embd=8, n_head=2), 1),
    ],
)
def test_a_model_is_cut_by_the_divisors_of_its_parts_alone(config: PretrainedConfig, parts: int) -> None:
    model = on_meta(config)
    for tp in range(2, 9):
        if parts % tp:
            with pytest.raises(ModelError):
                tensor_plan(model, tp, sequence_parallel=False, key=KEY)
        else:
            tensor_plan(model, tp, sequence_parallel=False, key=KEY)


def test_models_that_transformers_cuts_otherwise_or_not_at_all() -> None:
    with pytest.raises(ModelError, match="no tensor-parallel plan for GPT2LMHeadModel; set it to 1"):
        tensor_plan(on_meta(GPT2Config(n_layer=1, n_embd=8, n_head=2)), 2, sequence_parallel=False, key=KEY)
    with pytest.raises(ModelError, match=r"does not say how model\.layers\.0\.mlp\.shared_expert\.gate_proj is cut"):
        tensor_plan(on_meta(MIXTURES["qwen2_moe, a gated shared expert"]), 2, sequence_parallel=False, key=KEY)
    quantised = on_meta(LlamaConfig(**SIZES))
    quantised.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ModelError, match=r"quantised weights \(gptq\) cannot be cut"):
        tensor_plan(quantised, 2, sequence_parallel=False, key=KEY)


def test_experts_that_cannot_be_cut() -> None:
    """Bugs: a plan for experts that the ranks do not divide, or for attention that reads only some positions."""
    model = on_meta(MIXTURES["mixtral, all layers"])
    plan = tensor_plan(model, 2, sequence_parallel=True, key=KEY)
    assert plan.mixtures == ("model.layers.0.mlp", "model.layers.1.mlp")
    assert plan.experts == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    assert plan.blocks == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    three = on_meta(MixtralConfig(**SIZES, num_local_experts=3))
    with pytest.raises(ModelError, match=r"=2: experts of model\.layers\.0\.mlp\.experts=3 of .* set it to one of: 1$"):
        tensor_plan(three, 2, sequence_parallel=False, key=KEY)
    for family in ("gpt_oss, biases and sinks", "deepseek_v3, shared experts"):
        with pytest.raises(
            ModelError, match=r"leaves model\.layers\.0\.self_attn\..* whole, .* sequence_parallel=false"
        ):
            tensor_plan(on_meta(MIXTURES[family]), 2, sequence_parallel=True, key=KEY)


def test_positions_can_only_be_shared_by_several_ranks() -> None:
    with pytest.raises(ValueError, match="sequence_parallel=true with tp=1"):
        Parallelism(sequence_parallel=True)
