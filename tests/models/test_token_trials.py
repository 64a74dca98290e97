"""Trials that find models which read later tokens, and models whose samples depend on the prompts beside them."""

import pytest
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    BartConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    Mamba2Config,
    PretrainedConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RobertaConfig,
    RwkvConfig,
    XLNetConfig,
)

from nemo_opd.errors import ModelError
from nemo_opd.models.load import text_part
from nemo_opd.models.token_trials import batching, miniatures, require_causal
from tests.models.families import SIZES

NOT_CAUSAL = {
    "tiny roberta": RobertaConfig(**SIZES),
    "gemma3 that embeds": Gemma3TextConfig(use_bidirectional_attention=True),
    "xlnet": XLNetConfig(),
}
CAUSAL = {
    "tiny llama": LlamaConfig(**SIZES),
    "roberta as decoder": RobertaConfig(is_decoder=True),
    "gemma3": Gemma3TextConfig(),
    "deepseek_v3": DeepseekV3Config(),
    "gpt_oss": GptOssConfig(),
    "qwen3_moe": Qwen3MoeConfig(),
    "qwen3_next": Qwen3NextConfig(),
    "mamba2": Mamba2Config(),
    "rwkv": RwkvConfig(),
}
BATCHING = {
    "rwkv": (RwkvConfig(), "alone"),
    "tiny rwkv": (RwkvConfig(vocab_size=96, hidden_size=32, num_hidden_layers=3), "alone"),
    "recurrent_gemma": (RecurrentGemmaConfig(), "equal_lengths"),
    "bart": (BartConfig(), "equal_lengths"),
    **{name: (CAUSAL[name], "any") for name in ("tiny llama", "gemma3", "gpt_oss", "qwen3_next", "mamba2")},
}

ENCODERS = {
    "Bert",
    "BertGeneration",
    "BigBird",
    "Camembert",
    "CpmAnt",
    "Data2VecText",
    "Electra",
    "Ernie",
    "ProphetNet",
    "RemBert",
    "Roberta",
    "RobertaPreLayerNorm",
    "RoCBert",
    "RoFormer",
    "XLM",
    "XLMRoberta",
    "XLMRobertaXL",
    "XLNet",
}
"""Families in transformers' list of causal models that are not causal by default. CPM-Ant reads its text as context in
both directions, and ProphetNet mixes positions in its prediction stream (its main stream is causal).
"""


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_a_model_that_reads_later_tokens_is_refused(name: str) -> None:
    """Bug: an encoder, or Gemma 3 for embeddings, is trained as if it predicted the next token."""
    with pytest.raises(ModelError, match=r"student\.model=FOLDER: .*come after.*name a causal language model"):
        require_causal(NOT_CAUSAL[name], "FOLDER", key="student.model")


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_passes(name: str) -> None:
    """Bug: a mixture, a state or a window counts as reading later tokens."""
    require_causal(CAUSAL[name], "FOLDER", key="student.model")


@pytest.mark.parametrize("name", BATCHING)
def test_models_are_sampled_in_batches_that_change_nothing(name: str) -> None:
    """Bugs: states or positions that include padding or mix rows are not noticed; the trial is so strict that ordinary
    models are sampled a few rows at a time.
    """
    config, expected = BATCHING[name]
    assert batching(config) == expected


def test_a_miniature_is_small_and_the_same_each_time() -> None:
    """Bugs: a trial builds billions of weights; its result or random state differs by rank."""
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = (next(miniatures(DeepseekV3Config(), seed=0)) for _ in range(2))
    assert torch.rand(1) == expected
    assert sum(parameter.numel() for parameter in first.parameters()) < 30_000_000
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.nightly
def test_every_family_of_transformers_is_judged_rightly() -> None:
    """Bugs: a causal family is refused; a family's sizes can no longer be reduced."""
    refused, tried = set(), 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            config: PretrainedConfig = text_part(kind())
        except Exception:  # some have no default
            continue
        tried += next(miniatures(config, seed=0), None) is not None
        try:
            require_causal(config, "FOLDER", key="student.model")
        except ModelError:
            refused.add(type(config).__name__.removesuffix("Config"))
    assert refused == ENCODERS
    assert tried > 165
