"""FLOPs of a step against PyTorch's count, and model FLOPs utilization (MFU)."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PretrainedConfig, Qwen3Config

from nemo_opd.config.model import Lora
from nemo_opd.models.lora import Adapters
from nemo_opd.preflight.flops import Utilization, forward_flops, num_scores, peak_flops, training_flops
from nemo_opd.preflight.model_info import model_size
from nemo_opd.types import Batch, TeacherRows, TokenRows

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "attn_implementation": "eager",  # PyTorch counts its products on every device
}


def counted(config: PretrainedConfig, rows: int, length: int, *, backward: bool) -> int:
    """Return FLOPs as PyTorch counts them op by op, without the products for rotary angles."""
    model: Any = AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(rows, length, dtype=torch.long)
    with FlopCounterMode(display=False, depth=None) as counter:
        logits = model(input_ids=ids, use_cache=False).logits
        if backward:
            logits.sum().backward()
    angles = [sum(flops.values()) for name, flops in counter.get_flop_counts().items() if name.endswith(".rotary_emb")]
    return counter.get_total_flops() - sum(angles)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("make", [LlamaConfig, Qwen3Config, Gemma2Config])
@pytest.mark.parametrize("backward", [False, True])
def test_flops_are_those_that_pytorch_counts(make: type[PretrainedConfig], tied: bool, backward: bool) -> None:
    """Equal up to the causal mask: PyTorch counts all S² scores, and causal attention needs S · (S + 1) / 2."""
    config = make(**SHAPE, tie_word_embeddings=tied)
    rows, length = 2, 12
    size, lengths = model_size(config), (length,) * rows
    flops = training_flops(size, lengths) if backward else forward_flops(size, lengths, rows * length)
    all_scores = flops.attention * length**2 // num_scores(length, None)
    assert counted(config, rows, length, backward=backward) == flops.matrices + flops.head + all_scores


@pytest.mark.parametrize("window", [None, 1, 5, 12, 40])
def test_scores_of_causal_attention(window: int | None) -> None:
    for length in (1, 5, 12):
        needed = sum(1 for i in range(length) for k in range(i + 1) if window is None or i - k < window)
        assert num_scores(length, window) == needed


def test_frozen_weights_get_no_gradient() -> None:
    config = LlamaConfig(**SHAPE)
    full, frozen = (training_flops(model_size(config, lora), (12,)) for lora in (None, Adapters(Lora(), "", 0)))

    assert (3 * frozen.matrices, 3 * frozen.head) == (2 * full.matrices, 2 * full.head)
    assert frozen.attention == full.attention


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10G", None),
        ("AMD EPYC 7B13, 2 cores", None),
    ],
)
def test_a_peak_is_that_of_the_very_device(device: str, peak: float | None) -> None:
    assert peak_flops(device) == peak


def rows_of(lengths: list[int], scored: list[int]) -> TokenRows:
    """Return rows of these lengths; the mask has the last `scored` tokens of each."""
    place, ends = torch.arange(max(lengths)), torch.tensor(lengths).unsqueeze(1)
    mask = (place < ends) & (place >= ends - torch.tensor(scored).unsqueeze(1))
    zeros = torch.zeros(mask.shape, dtype=torch.long)
    return TokenRows(zeros, torch.tensor(lengths), mask, zeros.int())


def test_mfu_is_the_work_of_a_step_over_the_peak_of_all_devices() -> None:
    student, teacher = (model_size(LlamaConfig(**SHAPE | {"hidden_size": width})) for width in (32, 64))
    batch = Batch(rows_of([10, 8], [9, 7]), (TeacherRows(rows_of([12, 9], [4, 3]), None),))
    work = training_flops(student, [10, 8]).total + forward_flops(teacher, [12, 9], 4 + 3).total

    values = Utilization(student, (teacher,), 2, 1e9).values(batch, 0.5)

    assert values == pytest.approx({"perf/tflops_per_s": work / 1e12, "perf/mfu": work / 1e9})
    assert "perf/mfu" not in Utilization(student, (teacher,), 2, None).values(batch, 0.5)
