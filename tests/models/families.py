"""Tiny configurations of transformers' model families, and folders with random weights for them."""

from copy import deepcopy
from pathlib import Path

import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

VOCABULARY = 41
"""A prime, so no number of ranks divides it."""
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 3.0],
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
    "qwen2, biases": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3, norms of heads": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),
    "gemma2, soft-cap": Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=5.0),
    "gemma3, two rotary embeddings": Gemma3TextConfig(
        **SIZES, head_dim=8, layer_types=["sliding_attention", "full_attention"], sliding_window=4
    ),
    "phi, biases": PhiConfig(**{**SIZES, "num_key_value_heads": 4}, qk_layernorm=True),
    "phi3, fused": Phi3Config(**SIZES, rope_parameters=LONG_ROPE, tie_word_embeddings=False),
    "olmo2, norms of all heads": Olmo2Config(**SIZES, tie_word_embeddings=False),
}
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8, "tie_word_embeddings": False}
"""Four experts in each layer; the router sends a token to two."""
MIXTURES: dict[str, PretrainedConfig] = {
    "qwen3_moe, and a dense layer": Qwen3MoeConfig(
        **SIZES, **EXPERTS, num_experts=4, moe_intermediate_size=16, norm_topk_prob=True, mlp_only_layers=[0]
    ),
    "mixtral, all layers": MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4),
    "gpt_oss, biases and sinks": GptOssConfig(
        **SIZES, **EXPERTS, num_local_experts=4, sliding_window=4, rope_parameters=LLAMA3_ROPE
    ),
    "deepseek_v3, shared experts": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=16,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        tie_word_embeddings=False,
    ),
    "qwen2_moe, a gated shared expert": Qwen2MoeConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=20,
        tie_word_embeddings=False,
    ),
}

MIXED = tuple(MIXTURES)[:4]
"""Mixtures that tensor parallelism can cut."""


def model_of(family: str, seed: int = 0) -> PreTrainedModel:
    """Return a model whose weights are all random: biases of 0 and norms of 1 would hide a missing one."""
    model = AutoModelForCausalLM.from_config(
        deepcopy((FAMILIES | MIXTURES)[family])
    ).eval()  # models change their configuration
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, std=0.3, generator=generator)
    return model


def save(family: str, folder: Path) -> Path:
    """Save the family's model in several files; return its folder."""
    path = folder / family.split(",")[0]
    model_of(family).save_pretrained(path, max_shard_size="8KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path
