"""Lengths that change rotary factors, read from transformers' configurations."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PretrainedConfig

from nemo_opd.rotary import rotary_limit
from tests.models.families import SIZES

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.0],
    "long_factor": [4.0, 4.0],
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "build"),
    [
        (
            Phi3Config(
                **{**SIZES, "max_position_embeddings": 128},
                original_max_position_embeddings=32,
                rope_parameters=dict(LONG_ROPE),
            ),
            Phi3ForCausalLM,
        ),
        (LlamaConfig(**{**SIZES, "max_position_embeddings": 32}, rope_parameters=DYNAMIC), LlamaForCausalLM),
        (LlamaConfig(**SIZES), LlamaForCausalLM),
    ],
)
def test_texts_are_read_alike_if_their_common_beginning_has_the_same_logits(
    config: PretrainedConfig, build: type[torch.nn.Module]
) -> None:
    """Catches a limit that is off by one, or read from the wrong key."""
    torch.manual_seed(0)
    model = build(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(4, 40, (1, 48))
    limit = rotary_limit(config.to_dict())
    lengths = (16, 31, 32, 33, 40, 48)
    with torch.no_grad():
        logits = {first: model(input_ids=ids[:, :first], use_cache=False).logits[0, :16] for first in lengths}
    for first in lengths:
        for second in lengths:
            is_same = torch.allclose(logits[first], logits[second], atol=1e-4)
            assert is_same == (limit is None or limit.reads_alike(first, second)), (first, second)


def test_the_smallest_limit_of_several_embeddings_counts() -> None:
    """Catches a model whose layers have different embeddings and only one of them changes."""
    rope = {"full_attention": LONG_ROPE, "sliding_attention": {"rope_type": "default"}}
    limit = rotary_limit({"rope_parameters": rope, "max_position_embeddings": 64})
    assert limit is not None
    assert (limit.length, limit.grows) == (32, False)
    assert rotary_limit({"rope_parameters": None}) is None
