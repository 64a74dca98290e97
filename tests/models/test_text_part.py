"""Only the text part of a multimodal model is loaded, and its logits for text equal the full model's."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    LlavaConfig,
    Mistral3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)

from nemo_opd.errors import ModelError
from nemo_opd.models.load import load_config, load_model
from nemo_opd.models.stored_weights import check_weights
from tests.models.families import SIZES
from tests.models.test_sharded_load import loaded
from tests.models.world import alone

pytestmark = pytest.mark.world

TEXT = {**SIZES, "head_dim": 8}
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "image_size": 8, "patch_size": 4}
QWEN_VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 16}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
WHOLE: dict[str, PretrainedConfig] = {
    "gemma3": Gemma3Config(
        text_config={**TEXT, **SLIDING}, vision_config={**VISION, "num_hidden_layers": 1}, mm_tokens_per_image=4
    ),
    "mistral3": Mistral3Config(
        text_config={**TEXT, "model_type": "mistral"},
        vision_config={**VISION, "num_hidden_layers": 1, "model_type": "pixtral", "head_dim": 8},
        tie_word_embeddings=False,
    ),
    "qwen3_vl": Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": {**AXES, "mrope_interleaved": True}},
        vision_config={**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        tie_word_embeddings=True,
    ),
    "qwen2_5_vl": Qwen2_5_VLConfig(
        text_config={**SIZES, "rope_parameters": {**AXES, "mrope_section": [1, 1, 0]}},
        vision_config=QWEN_VISION,
        tie_word_embeddings=False,
    ),
    "llava": LlavaConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**VISION, "num_hidden_layers": 1, "model_type": "clip_vision_model"},
        tie_word_embeddings=False,
    ),
}
IDS = torch.arange(18).view(2, 9)


@pytest.fixture
def one_rank() -> Iterator[None]:
    with alone():
        yield


def save(kind: str, folder: Path, **sizes: int) -> PreTrainedModel:
    config = deepcopy(WHOLE[kind])
    config.get_text_config().update(sizes)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    model.save_pretrained(folder)
    return model


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("kind", WHOLE)
def test_the_text_part_says_what_the_whole_model_says(one_rank: None, kind: str, tmp_path: Path) -> None:
    """Bugs: weights under other names stay random; rotary angles or tied heads follow another configuration; an unused
    vision tower is loaded; saved weights have names that no text model has."""
    full_model = save(kind, tmp_path / "whole")
    part = loaded(tmp_path / "whole")
    read_at_once = load_model(str(tmp_path / "whole"), torch.float32, key="student.model")

    for model in (part, read_at_once):
        assert not [name for name, _ in model.named_parameters() if "vis" in name or "projector" in name]
        torch.testing.assert_close(logits(model), logits(full_model), rtol=1e-6, atol=1e-6)
    for name, model in (("piecewise", part), ("read whole", read_at_once)):
        model.save_pretrained(tmp_path / name)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert type(again) is type(part)
        assert torch.equal(logits(again), logits(model))


def test_names_of_older_files(one_rank: None, tmp_path: Path) -> None:
    """Bug: names that older versions of transformers wrote are unknown."""
    full_model = save("mistral3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "language_model.model.norm.weight" in tensors
    renamed = {
        name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        ): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(loaded(tmp_path)), logits(full_model))


def test_what_cannot_be_read_as_text(tmp_path: Path) -> None:
    save("qwen3_vl", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = load_config(str(tmp_path), key="teachers.0.model")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=r"^teachers\.0\.model=.* missing \(model\.layers\.1\.mlp\.up_proj"):
        check_weights(model, str(tmp_path), key="teachers.0.model")
    quantised = Qwen3VLConfig.from_pretrained(tmp_path)
    quantised.quantization_config = {"quant_method": "fp8"}
    quantised.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"qwen3_vl reads more than text and is quantised"):
        load_config(str(tmp_path), key="teachers.0.model")
