"""FLOPs that a training step needs in any implementation, and the MFU of a step by its time.

A token costs 2 FLOPs for each weight that it is multiplied by, and attention 4 · Q FLOPs for each score, with Q the
width of all query heads: one product with the keys, one with the values. The backward pass costs twice the forward
pass. With N the weights of the matrices in the layers (of those experts that a token is sent to), S and T the tokens of
a text on either side, L layers, V and W the columns of logits, which a head may have more rows than (its tokenizer's
ids alone are computed), and U rows of the teacher that losses may compare, those before its scored tokens:

    student   6 · N · S + 6 · D · V · S + 12 · Σ_L Q · scores(S)
    teacher   2 · N · T + 2 · E · W · U +  4 · Σ_L Q · scores(T)

scores(S) = Σ_i min(i, window): what causal attention needs, about S²/2, where others count S². A student with adapters
has 4 in place of 6, as its own weights get no gradient. Not counted: norms, softmaxes, the losses themselves, the
optimizer, adapters, padding, and what activation checkpointing computes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_opd.training.model_size import ModelSize
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
"""FLOP/s of a GPU whose name has these words, in bf16 with fp32 sums and without sparsity [NVIDIA's data sheets]."""


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
    """Return the FLOPs of a forward pass over texts of these lengths in tokens; head_rows: tokens that need logits."""
    weights = sum(layer.active_weights for layer in size.layers)
    attention = sum(layer.query_width * num_scores(length, layer.window) for layer in size.layers for length in lengths)
    return Flops(2 * weights * sum(lengths), 2 * size.hidden_size * size.vocab_size * head_rows, 4 * attention)


def training_flops(size: ModelSize, lengths: Sequence[int]) -> Flops:
    """Return the FLOPs of a student's forward and backward pass."""
    once, of_weights = forward_flops(size, lengths, sum(lengths)), 2 if size.adapters else 3
    return Flops(of_weights * once.matrices, of_weights * once.head, 3 * once.attention)


def num_scores(length: int, window: int | None) -> int:
    """Return the number of scores that causal attention computes in one head for a text of `length` tokens."""
    full = min(length, window or length)
    return full * (full + 1) // 2 + (length - full) * full


def peak_flops(device: str) -> float | None:
    """Return the FLOP/s of a device of this name; None if they are not known."""
    words = device.replace("-", " ").split()
    return next((peak for name, peak in _PEAKS.items() if set(name.split()) <= set(words)), None)


@dataclass(frozen=True, slots=True)
class Utilization:
    """Work of a run's models, whose `vocab_size` is the columns of logits, and the devices that do it."""

    student: ModelSize
    teachers: tuple[ModelSize | None, ...]
    """One per active teacher; None for one that is cached and computes nothing."""
    num_devices: int
    peak: float | None
    """FLOP/s of one device; None if unknown."""

    def values(self, batch: Batch, seconds: float) -> dict[str, float]:
        """Return `perf/tflops_per_s` of a device in a step of `seconds`, and `perf/mfu` where the peak is known."""
        total = training_flops(self.student, batch.student.lengths.tolist()).total
        for size, rows in zip(self.teachers, batch.teachers, strict=True):
            tokens = rows.tokens
            if size is not None:
                total += forward_flops(size, tokens.lengths.tolist(), int(tokens.loss_mask.sum())).total
        achieved = total / seconds / self.num_devices
        found = {"perf/tflops_per_s": achieved / 1e12}
        return found if self.peak is None else found | {"perf/mfu": achieved / self.peak}
