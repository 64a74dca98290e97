"""Checks of the losses' arguments."""

from collections.abc import Sequence

from torch import Tensor

from nemo_opd.errors import ConfigError


def check_temperature(temperature: float) -> None:
    """Raise ConfigError unless the temperature is above 0."""
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature} cannot divide logits; give a number above 0")


def over(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits by the temperature. Returns the same tensor at 1."""
    return logits if temperature == 1 else logits / temperature


def check_same_length(**tensors: Tensor) -> None:
    """Raise ConfigError if tensors [B, ...] have different numbers of sequences."""
    lengths = {name: len(tensor) for name, tensor in tensors.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ConfigError(f"numbers of sequences differ ({listed}); row b must be the same text in all of them")


def check_positions(logits_shape: Sequence[int], **tensors: Tensor) -> None:
    """Raise ConfigError if a tensor is not [B, S] for logits of shape [B, S, V]."""
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(logits_shape[:2]):
            raise ConfigError(
                f"{name} has shape {list(tensor.shape)}, its logits {list(logits_shape)}; "
                f"give one entry per position: {list(logits_shape[:2])}"
            )


def without_none(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Drop arguments that are None."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def check_sequence_weights(weights: Tensor | None, num_sequences: int) -> None:
    """Raise ConfigError unless weights are [B]."""
    if weights is not None and tuple(weights.shape) != (num_sequences,):
        raise ConfigError(
            f"sequence_weights has shape {list(weights.shape)} for {num_sequences} sequences; "
            f"give one weight each: [{num_sequences}]"
        )


def own_columns(key: str, vocab_size: int | None, default: int, num_columns: int) -> int:
    """Return the vocabulary size, by default `default`. Raises ConfigError unless it is in [1, num_columns]."""
    size = default if vocab_size is None else vocab_size
    if not 0 < size <= num_columns:
        raise ConfigError(
            f"{key}={size}: the logits have {num_columns} columns; "
            "give the size of the model's own vocabulary, or resize its head to the tokenizer"
        )
    return size


def shared_columns(
    student_columns: int, teacher_columns: int, student_vocab_size: int | None, teacher_vocab_size: int | None
) -> int:
    """Return the size of a vocabulary that both sides share, by default the width of the narrower head.

    Raises ConfigError for two different sizes, or a size wider than a head.
    """
    if None not in (student_vocab_size, teacher_vocab_size) and student_vocab_size != teacher_vocab_size:
        raise ConfigError(
            f"student_vocab_size={student_vocab_size} and teacher_vocab_size={teacher_vocab_size} differ, "
            "but this loss compares columns one to one; use a cross-tokenizer loss such as p_kl"
        )
    vocab_size = teacher_vocab_size if student_vocab_size is None else student_vocab_size
    narrower = min(student_columns, teacher_columns)
    own_columns("student_vocab_size", vocab_size, narrower, student_columns)
    return own_columns("teacher_vocab_size", vocab_size, narrower, teacher_columns)
