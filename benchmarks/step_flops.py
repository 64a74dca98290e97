"""The work of a training step that any implementation has to do, and so the MFU of one that took so long.

A token costs 2 FLOPs for each weight that it is multiplied by, and attention 4 · Q FLOPs for each score, with Q the
width of all query heads: one product with the keys, one with the values. The backward pass costs twice the forward
pass. With N the weights of the matrices in the layers (of those experts that a token is sent to), S and T the tokens of
a text on either side, L layers, and U rows of the teacher that a loss compares:

    student   6 · N · S + 6 · D · V · S + 12 · Σ_L Q · scores(S)
    teacher   2 · N · T + 2 · E · W · U +  4 · Σ_L Q · scores(T)

scores(S) = Σ_i min(i, window): what causal attention needs, about S²/2, where others count S². Not counted: norms,
softmaxes, the losses themselves, the optimizer, padding, and what activation checkpointing computes again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_opd.training.memory import ModelSize

DENSE_BF16_PEAK = 989e12
"""FLOP/s of an H100 or H200 (SXM)."""


@dataclass(frozen=True)
class Flops:
    matrices: int
    head: int
    attention: int

    @property
    def total(self) -> int:
        return self.matrices + self.head + self.attention

    def times(self, factor: int) -> "Flops":
        return Flops(factor * self.matrices, factor * self.head, factor * self.attention)


def forward(size: ModelSize, lengths: Sequence[int], head_rows: int) -> Flops:
    """Of texts with so many tokens each, of which the head is applied to `head_rows`."""
    weights = sum(layer.active_weights for layer in size.layers)
    attention = sum(layer.query_width * scores(length, layer.window) for layer in size.layers for length in lengths)
    return Flops(2 * weights * sum(lengths), 2 * size.hidden_size * size.vocab_size * head_rows, 4 * attention)


def scores(length: int, window: int | None) -> int:
    """That causal attention needs of one head."""
    full = min(length, window or length)
    return full * (full + 1) // 2 + (length - full) * full


@dataclass(frozen=True)
class StepWork:
    """What the texts of a global batch are."""

    student_lengths: tuple[int, ...]
    teacher_lengths: tuple[int, ...]
    compared_rows: int
    """Units of the distillation loss."""

    @property
    def student_tokens(self) -> int:
        return sum(self.student_lengths)

    def flops(self, student: ModelSize, teacher: ModelSize) -> dict[str, Flops]:
        return {
            "student": forward(student, self.student_lengths, self.student_tokens).times(3),
            "teacher": forward(teacher, self.teacher_lengths, self.compared_rows),
        }
