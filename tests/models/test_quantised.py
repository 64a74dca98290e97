"""Quantised teachers are loaded as transformers does, or dequantised, or refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from nemo_opd.config.model import Parallelism, Student
from nemo_opd.distributed.layout import Layout
from nemo_opd.distributed.process_group import build_mesh
from nemo_opd.errors import ModelError
from nemo_opd.models.sharded_load import load_sharded
from tests.models.families import SIZES
from tests.models.world import alone, as_rank

pytestmark = pytest.mark.world

BLOCK = 32
WIDE = {**SIZES, "hidden_size": 2 * BLOCK, "intermediate_size": 4 * BLOCK, "tie_word_embeddings": False}
IDS = torch.arange(12).view(2, 6)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture
def one_rank() -> Iterator[None]:
    with alone():
        yield


def loaded(folder: Path, num_ranks: int = 1, *, trainable: bool = False) -> PreTrainedModel:
    return load_sharded(
        Student(model=str(folder), parallelism=Parallelism(tp=num_ranks)),
        torch.float32,
        build_mesh(Layout(1, 1, num_ranks), "cpu"),
        key="teachers.0.model",
        compute_dtype=torch.float32,
        device="cpu",
        trainable=trainable,
    )


def save_plain(config: PretrainedConfig, folder: Path) -> dict[str, Tensor]:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def save_quantised(plain: Path, folder: Path, tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    values = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": settings}))


def save_fp8(folder: Path, **sizes: int) -> None:
    """Write a model in fp8 to `folder`/quantised, and its dequantised weights to `folder`/plain."""
    tensors = save_plain(LlamaConfig(**{**WIDE, **sizes}), folder / "plain")
    quantised = dict(tensors)
    for name, weight in tensors.items():
        if "_proj" in name:
            rows, columns = (size // BLOCK for size in weight.shape)
            blocks = weight.view(rows, BLOCK, columns, BLOCK)
            scales = blocks.abs().amax((1, 3)) / 448
            codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            quantised |= {name: codes.view_as(weight), f"{name}_scale_inv": scales}
            tensors[name] = (codes.float() * scales[:, None, :, None]).view_as(weight)
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    save_quantised(folder / "plain", folder / "quantised", quantised, settings)
    save_file(tensors, folder / "plain/model.safetensors", {"format": "pt"})


def save_mxfp4(folder: Path, **sizes: int) -> None:
    """Do the same for gpt-oss with experts in mxfp4: 4-bit codes (the first in the low bits) and exponents."""
    config = GptOssConfig(**{**WIDE, **sizes}, head_dim=16, num_local_experts=2, num_experts_per_tok=1)
    tensors = save_plain(config, folder / "plain")
    quantised = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, width, height = tensors[name].shape
        codes = torch.randint(0, 16, (experts, height, width // BLOCK, BLOCK))
        exponents = torch.randint(120, 124, codes.shape[:3])
        del quantised[name]
        quantised[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).byte()
        quantised[f"{name}_scales"] = exponents.byte()
        values = FP4[codes] * 2.0 ** (exponents - 127).unsqueeze(-1)
        tensors[name] = values.flatten(2).transpose(1, 2).contiguous()
    save_quantised(folder / "plain", folder / "quantised", quantised, {"quant_method": "mxfp4"})
    save_file(tensors, folder / "plain/model.safetensors", {"format": "pt"})


def save_compressed(folder: Path) -> None:
    """Do the same in int8 as compressed-tensors stores it, with a scale for each row."""
    pytest.importorskip("compressed_tensors", reason="it is not installed (the extra quantised)")
    tensors = save_plain(LlamaConfig(**WIDE), folder / "plain")
    quantised = dict(tensors)
    for name, weight in tensors.items():
        if "_proj" in name:
            scales = weight.abs().amax(1, keepdim=True) / 127
            codes = (weight / scales).round()
            quantised |= {name: codes.to(torch.int8), name.replace("weight", "weight_scale"): scales}
            tensors[name] = codes * scales
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    save_quantised(folder / "plain", folder / "quantised", quantised, settings)
    save_file(tensors, folder / "plain/model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("save", [save_fp8, save_mxfp4, save_compressed])
def test_what_is_cut_is_dequantised(save: Any, tmp_path: Path) -> None:
    """Bugs: codes are read as weights, without their scales; a rank's part has other rows than the plain model's."""
    save(tmp_path)
    for rank in range(2):
        with as_rank(rank, 2):
            quantised, plain = (dict(loaded(tmp_path / kind, 2).named_parameters()) for kind in ("quantised", "plain"))
        assert quantised.keys() == plain.keys()
        for name, parameter in plain.items():
            actual: Any = quantised[name]
            expected: Any = parameter
            assert actual.placements == expected.placements
            # Dequantised in bfloat16.
            torch.testing.assert_close(actual.to_local(), expected.to_local(), rtol=2**-8, atol=0)


def test_one_rank_keeps_what_is_quantised(one_rank: None, tmp_path: Path) -> None:
    """Bug: FSDP2 gathers packed codes in the compute precision, as if they were weights."""
    pytest.importorskip("bitsandbytes", reason="it is not installed (the extra quantised)")
    save_plain(LlamaConfig(**WIDE), tmp_path / "plain")
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=four_bits, device_map="cpu")
    stored.save_pretrained(tmp_path / "quantised")
    model = loaded(tmp_path / "quantised")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised", dtype=torch.float32, device_map="cpu")
    assert torch.uint8 in {parameter.dtype for parameter in model.parameters()}
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, expected(input_ids=IDS).logits)
    with pytest.raises(ModelError, match=r"quantised \(bitsandbytes\), and a student's are trained;"):
        loaded(tmp_path / "quantised", trainable=True)


def test_what_cannot_be_dequantised_is_not_cut(tmp_path: Path) -> None:
    tensors = save_plain(LlamaConfig(**WIDE), tmp_path / "plain")
    save_quantised(tmp_path / "plain", tmp_path / "quantised", tensors, {"quant_method": "gptq", "bits": 4})
    with (
        as_rank(0, 2),
        pytest.raises(
            ModelError, match=r"quantised \(gptq\), and they would have to be cut over 2 ranks; name the unq"
        ),
    ):
        loaded(tmp_path / "quantised", 2)
