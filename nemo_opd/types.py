"""Types that cross boundaries between components, and the legend of tensor shapes.

Student side first, teacher side second (methods.md, notation):

    B  sequences in a (micro)batch
    S  student positions          T  teacher positions
    V  student vocabulary         W  teacher vocabulary
    D  student hidden width       E  teacher hidden width
    C  aligned chunks             K  kept columns
    U  units of a loss            N  normalizer: tokens or units of the global batch

A suffix such as `logits_BSV` names a tensor's axes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Number = float | Tensor


class Closing(ABC):
    """Base class of objects that the end of their `with` closes."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


HISTORY_SAME, HISTORY_REWRITTEN, HISTORY_CHANGED = range(3)
"""Kinds of history before a position: the same contents; the same except white space and Unicode form; different."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """The tokens of two tokenizations of one text that stand for the same bytes (methods.md §1.2).

    Chunk ids are −1 for tokens without a partner and non-decreasing otherwise.
    """

    student_chunk_id: NDArray[np.int32]
    """[S]"""
    teacher_chunk_id: NDArray[np.int32]
    """[T]"""
    bounds: NDArray[np.int32]
    """[C, 4]: student start, student end, teacher start, teacher end; ends are exclusive."""
    one_to_one: NDArray[np.bool_]
    """[C]: one token on either side."""
    inexact: NDArray[np.bool_]
    """[C]: the bytes of both sides differ. Losses skip these chunks."""
    special: NDArray[np.bool_]
    """[C]: a pair of special tokens with the same role."""
    whitespace: NDArray[np.bool_]
    """[C]: all bytes are ASCII white space."""
    digit: NDArray[np.bool_]
    """[C]: all bytes are ASCII digits."""
    history: NDArray[np.int8]
    """[C]: HISTORY_SAME, HISTORY_REWRITTEN or HISTORY_CHANGED, for the contents before the chunk; non-decreasing."""

    @property
    def num_chunks(self) -> int:
        return len(self.bounds)


PAD_ID = 0
"""An id in every vocabulary: causal models do not see padding, and the mask keeps it out of the losses."""
NO_CHUNK = -1
_FILL = "fill"
"""Metadata key of a field of `Rows`: the value of its padding and of empty rows, by default 0."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Tensors with a row per sequence, held as fields, in nested Rows or in tuples of these. A field may be None.

    Slices, copies and padding reach all fields, so a new field needs no other edit.
    """

    def map(self, function: Callable[[Tensor, int], Tensor]) -> Self:
        """Return a copy with every tensor replaced by `function(tensor, fill)`; fill: the value of its padding."""

        def mapped(value: Any, fill: int) -> Any:
            if value is None:
                return None
            if isinstance(value, Rows):
                return value.map(function)
            if isinstance(value, tuple):
                return tuple(mapped(element, fill) for element in value)
            return function(value, fill)

        return replace(self, **{f.name: mapped(getattr(self, f.name), f.metadata.get(_FILL, 0)) for f in fields(self)})

    def emptied(self, where: Tensor) -> Self:
        """Return a copy with empty rows at the true elements of bool [B]."""
        return self.map(lambda tensor, fill: tensor.masked_fill(where.view(-1, *[1] * (tensor.dim() - 1)), fill))

    def part(self, start: int, stop: int) -> Self:
        """Return rows [start, stop) at full width."""
        return self.map(lambda tensor, _: tensor[start:stop])

    def narrowed(self, width: int) -> Self:
        """Return a copy with the first `width` positions of each tensor that has positions."""
        return self.map(lambda tensor, _: tensor[:, :width] if tensor.dim() > 1 else tensor)


@dataclass(frozen=True, slots=True)
class TokenRows(Rows):
    """Sequences of one tokenizer, right-padded.

    Models are causal, so positions before the padding never see it and no attention mask is needed. Models that support
    packing read no padding at all.
    """

    ids: Tensor = field(metadata={_FILL: PAD_ID})
    """int64 [B, S]"""
    lengths: Tensor
    """int64 [B]: tokens before the padding."""
    loss_mask: Tensor
    """bool [B, S]: token i is scored, by the logits at i−1. False at position 0 and in the padding."""
    num_bytes: Tensor
    """int32 [B, S]: bytes of content per token; for a teacher's tokens, only bytes that all models of the sequence
    predict.
    """

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def packed_lengths(self) -> list[int]:
        """Tokens of each sequence that models read; an empty sequence has one, of padding."""
        lengths: list[int] = self.lengths.clamp(min=1).tolist()
        return lengths

    def rows(self, start: int, stop: int) -> TokenRows:
        """Return sequences [start, stop), cut to the longest of them (at least one position)."""
        part = self.part(start, stop)
        return part.narrowed(max(1, int(part.lengths.max()) if len(part) else 1))


@dataclass(frozen=True, slots=True)
class ChunkRows(Rows):
    """The alignment of a batch; chunks that losses must not use are already −1."""

    student: Tensor = field(metadata={_FILL: NO_CHUNK})
    """int32 [B, S]"""
    teacher: Tensor = field(metadata={_FILL: NO_CHUNK})
    """int32 [B, T]"""
    histories: Tensor | None = None
    """int64 [B, 2]: chunks that a loss could use, and how many of them follow contents that the sides read differently,
    compared or not. None in parts of a global batch.
    """


@dataclass(frozen=True, slots=True)
class MovedRows(Rows):
    """The student's tokens for a same-tokenizer teacher that reads them after another prompt (methods.md §13)."""

    by: Tensor
    """int64 [B]: position of a shared token in the teacher's sequence minus its position in the student's."""
    loss_mask: Tensor
    """bool [B, S]: token i of the student is compared, by the logits at i−1 and at i−1+by."""


@dataclass(frozen=True, slots=True)
class TeacherRows(Rows):
    """A batch as one teacher reads it."""

    tokens: TokenRows
    """The teacher's own tokens, or the student's if they share a tokenizer and the teacher has no separate prompt."""
    chunks: ChunkRows | None
    """The alignment with the student, or None if they share a tokenizer."""
    weights: Tensor | None = None
    """float32 [B]: weight of each sequence in this teacher's loss. None stands for 1."""
    rollout_weights: Tensor | None = None
    """float32 [B]: weight of each sequence among its prompt's samples, times `weights`; it also weights the
    sequence in the normalizer. None stands for 1.
    """
    moved: MovedRows | None = None
    """Set if positions differ from the student's, with the same tokenizer."""
    leakage: Tensor | None = None
    """int64 [B, 2]: bytes of the response that also occur in the teacher's context, and all its bytes. None without a
    context.
    """
    variants: tuple[TokenRows, ...] = ()
    """The same responses without the context and with another record's, for the privilege gap; empty if it is not
    measured, and in parts of a global batch.
    """

    def student_side(self, student: TokenRows) -> TokenRows:
        """Return the student's tokens that this teacher is compared on; with a shared tokenizer, its own.

        These may be fewer: a teacher that is not asked about a sequence has an empty row for it.
        """
        if self.moved is not None:
            return replace(student, loss_mask=self.moved.loss_mask)
        return self.tokens if self.chunks is None else student

    def logit_positions(self, student: TokenRows) -> tuple[int, Tensor | None]:
        """Return the number of positions that losses read this teacher's logits at, and their offsets, int64 [B] or
        None for 0.

        student: tokens of the same rows.
        """
        if self.moved is not None:
            return student.ids.shape[1], self.moved.by
        return self.tokens.ids.shape[1], None

    def without(self, where: Tensor) -> TeacherRows:
        """Return a copy with empty sequences at the true elements of bool [B]; their weights stay."""
        return replace(self.emptied(where), weights=self.weights, rollout_weights=self.rollout_weights)

    def rows(self, start: int, stop: int, student_width: int) -> TeacherRows:
        """Return sequences [start, stop), each side cut to its longest one. student_width: the student's."""
        part = replace(self, variants=()).part(start, stop)
        tokens, chunks, moved = self.tokens.rows(start, stop), part.chunks, part.moved
        if chunks is not None:
            width = tokens.ids.shape[1]
            student, teacher = chunks.student[:, :student_width], chunks.teacher[:, :width]
            chunks = replace(chunks, student=student, teacher=teacher, histories=None)
        if moved is not None:
            moved = moved.narrowed(student_width)
        return replace(part, tokens=tokens, chunks=chunks, moved=moved)


@dataclass(frozen=True, slots=True)
class SampledRows(Rows):
    """Log-probabilities, advantages and prompts of sampled sequences (methods.md §10.1)."""

    is_sampled: Tensor
    """bool [B]: false for sequences of a dataset in the batch."""
    logprobs: Tensor
    """float32 [B, S]: log-probabilities of the sampled tokens by the engine, at temperature 1; 0 elsewhere."""
    behaviour_logprobs: Tensor
    """float32 [B, S]: log-probabilities by the sampling policy, after temperature, top-k and top-p; 0 elsewhere."""
    advantages: Tensor
    """float32 [B]: advantage of each sequence over its prompt's other sequences; 0 if it was not sampled."""
    prompts: Tensor = field(metadata={_FILL: -1})
    """int64 [B]: index of the prompt that it continues; rollouts of one prompt share it."""


@dataclass(frozen=True, slots=True)
class Batch(Rows):
    """The same texts as the student and every teacher read them. Row b is the same text on all sides."""

    student: TokenRows
    teachers: tuple[TeacherRows, ...]
    sampled: SampledRows | None = None
    """None if all sequences are from a dataset."""
    row: Tensor | None = None
    """int64 [B]: consecutive index of the row that a sequence was packed into. None in parts of a global batch, and
    without packing.
    """
    domain: Tensor | None = field(default=None, metadata={_FILL: -1})
    """int64 [B]: domain of a validation text. None in parts of a global batch, and if texts have no domains."""
    shared_bytes: Tensor | None = None
    """int32 [B, S]: the student's bytes that all models of the sequence predict; each teacher's have the same sum. None
    in parts of a global batch, and without teachers.
    """

    def __len__(self) -> int:
        return len(self.student)

    @property
    def shared_student(self) -> TokenRows:
        """The student's tokens with the bytes that all models predict."""
        return self.student if self.shared_bytes is None else replace(self.student, num_bytes=self.shared_bytes)

    def rows(self, start: int, stop: int) -> Batch:
        """Return texts [start, stop), each side cut to its longest sequence among them."""
        student = self.student.rows(start, stop)
        width = student.ids.shape[1]
        teachers = tuple(teacher.rows(start, stop, width) for teacher in self.teachers)
        part = replace(self, teachers=(), row=None, domain=None, shared_bytes=None).part(start, stop)
        sampled = None if part.sampled is None else part.sampled.narrowed(width)
        return replace(part, student=student, teachers=teachers, sampled=sampled)


@dataclass(frozen=True, slots=True)
class Normalizers:
    """Counts of the global batch that sums are divided by (methods.md §7.1)."""

    ce: int
    """Label tokens of the sequences that were not sampled."""
    kd: tuple[float, ...]
    """Per part of the KD: label tokens of the texts with a unit, units with `normalizer=units`, or sequences for tcad;
    a sequence with a rollout weight counts that many times.
    """
    policy: int = 0
    """Sampled tokens that are scored."""


@dataclass(frozen=True, slots=True)
class SequenceScores:
    """A teacher's confidence in each sequence, on its own tokens (methods.md §6.1)."""

    bits: Tensor
    """float64 [B]: sum over scored tokens that carry text."""
    num_bytes: Tensor
    """int64 [B]: bytes of text that these tokens carry."""
    num_tokens: Tensor
    """int64 [B]: number of these tokens."""


@dataclass(frozen=True, slots=True)
class Mean:
    """total / count; merging adds both."""

    total: Number
    count: Number

    def merge(self, other: Self) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        count = float(self.count)
        return float(self.total) / count if count else 0.0


@dataclass(frozen=True, slots=True)
class Sum:
    """Merging adds."""

    total: Number

    def merge(self, other: Self) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float:
        return float(self.total)


@dataclass(frozen=True, slots=True)
class Max:
    """Merging keeps the larger; a NaN stays."""

    maximum: Number

    def merge(self, other: Self) -> Max:
        ours, theirs = self.maximum, other.maximum
        # No host synchronisation. `clamp` keeps a NaN of either side.
        if not isinstance(ours, float | int):
            return Max(ours.clamp(min=theirs))
        if not isinstance(theirs, float | int):
            return Max(theirs.clamp(min=ours))
        return Max(math.nan if math.isnan(ours) or math.isnan(theirs) else max(ours, theirs))

    def value(self) -> float:
        return float(self.maximum)


@dataclass(frozen=True, slots=True)
class Last:
    """Merging keeps the later value; for values that are equal on all ranks, such as the learning rate."""

    latest: Number

    def merge(self, other: Self) -> Last:
        return other

    def value(self) -> float:
        return float(self.latest)


@dataclass(frozen=True, slots=True)
class EffectiveShare:
    """(Σ w)² / (n Σ w²): the effective number of n units with weights w, as a share of n.

    Merging adds all three sums.
    """

    total: Number
    """Σ w"""
    squares: Number
    """Σ w²"""
    count: Number

    def merge(self, other: Self) -> EffectiveShare:
        return EffectiveShare(self.total + other.total, self.squares + other.squares, self.count + other.count)

    def value(self) -> float:
        weight = float(self.count) * float(self.squares)
        return float(self.total) ** 2 / weight if weight else 0.0


@dataclass(frozen=True, slots=True)
class PerText:
    """A text's bits and bytes, for each text; merging appends the later texts."""

    bits: tuple[float, ...]
    """Σ −log₂ p over the text's bytes."""
    num_bytes: tuple[int, ...]

    def merge(self, other: Self) -> PerText:
        return PerText(self.bits + other.bits, self.num_bytes + other.num_bytes)

    def value(self) -> float:
        return sum(self.bits) / max(1, sum(self.num_bytes))


Metric = Mean | Sum | Max | Last | EffectiveShare | PerText
Metrics = Mapping[str, Metric]


@dataclass(frozen=True, slots=True)
class LossOutput:
    """This rank's share of a loss: the sum of `loss` over ranks is the global value."""

    loss: Tensor
    """Scalar: sum over this call's units / normalizer."""
    metrics: dict[str, Metric]
    """Detached, each with its own reduction."""
