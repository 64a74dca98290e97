"""FLOPs that any implementation of a training step needs, and the step's MFU.

A token costs 2 FLOPs per weight that it is multiplied by, and attention 4 · Q FLOPs per score, with Q the total width
of the query heads: one product with the keys, one with the values. The backward pass costs twice the forward pass. N is
the number of weights in the layers' matrices (only experts that a token is routed to), S and T are the student's and
teacher's tokens of a text, L the layers, V and W the columns of logits (a head may have more rows than its tokenizer
has ids, which are not computed), and U the teacher rows that losses may compare, the rows before scored tokens:

    student   6 · N · S + 6 · D · V · S + 12 · Σ_L Q · scores(S)
    teacher   2 · N · T + 2 · E · W · U +  4 · Σ_L Q · scores(T)

scores(S) = Σ_i min(i, window), as causal attention needs: about S²/2 (other definitions of MFU count S²). A student
with adapters has 4 instead of 6, since its base weights get no gradient. Not counted: norms, softmaxes, the losses, the
optimizer, adapters, padding, and recomputation by activation checkpointing.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nemo_opd.cluster.placement import num_cores
from nemo_opd.preflight.model_info import ModelSize
from nemo_opd.types import Batch

_PEAKS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""FLOP/s of GPUs whose name contains these words: dense bf16 with fp32 accumulation [NVIDIA's data sheets]."""


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of a model on some texts."""

    matrices: int
    head: int
    attention: int

    @property
    def total(self) -> int:
        return self.matrices + self.head + self.attention


def forward_flops(size: ModelSize, lengths: Sequence[int], head_rows: int) -> Flops:
    """Compute the FLOPs of a forward pass over texts of these lengths in tokens. head_rows: tokens that need logits."""
    weights = sum(layer.active_weights for layer in size.layers)
    attention = sum(layer.query_width * num_scores(length, layer.window) for layer in size.layers for length in lengths)
    return Flops(2 * weights * sum(lengths), 2 * size.hidden_size * size.vocab_size * head_rows, 4 * attention)


def training_flops(size: ModelSize, lengths: Sequence[int]) -> Flops:
    """Compute the FLOPs of a student's forward and backward pass."""
    forward, factor = forward_flops(size, lengths, sum(lengths)), 2 if size.adapters else 3
    return Flops(factor * forward.matrices, factor * forward.head, 3 * forward.attention)


def num_scores(length: int, window: int | None) -> int:
    """Count the scores that causal attention computes in one head for a text of `length` tokens."""
    full = min(length, window or length)
    return full * (full + 1) // 2 + (length - full) * full


def peak_flops(device: str) -> float | None:
    """Return a device's peak FLOP/s by its name, or None if unknown."""
    words = device.replace("-", " ").split()
    return next((peak for name, peak in _PEAKS.items() if set(name.split()) <= set(words)), None)


@dataclass(frozen=True, slots=True)
class Utilization:
    """Models of a run and the devices that run them. `vocab_size` of the sizes is the number of logit columns."""

    student: ModelSize
    teachers: tuple[ModelSize | None, ...]
    """One entry per active teacher, or None if its output is not computed here."""
    num_devices: int
    peak: float | None
    """Peak FLOP/s of one device, or None if unknown."""

    def values(self, batch: Batch, seconds: float) -> dict[str, float]:
        """Return `perf/tflops_per_s` per device in a step of `seconds`, and `perf/mfu` if the peak is known."""
        total = training_flops(self.student, batch.student.lengths.tolist()).total
        for size, rows in zip(self.teachers, batch.teachers, strict=True):
            tokens = rows.tokens
            if size is not None:
                total += forward_flops(size, tokens.lengths.tolist(), int(tokens.loss_mask.sum())).total
        achieved = total / seconds / self.num_devices
        metrics = {"perf/tflops_per_s": achieved / 1e12}
        return metrics if self.peak is None else metrics | {"perf/mfu": achieved / self.peak}


def device_name(device: str) -> str:
    """Return the name of this machine's GPU or CPU; the kind of device if this machine has no such GPU."""
    if device == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return _cpu_name() if device == "cpu" else device


def _cpu_name() -> str:
    """Return text such as `AMD EPYC 7B13, 2 cores`."""
    cores = num_cores()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.machine()}, {cores} core{'s' * (cores > 1)}"
