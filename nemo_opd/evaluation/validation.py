"""Validation metrics on held-out text."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.alignment.pieces import Pieces
from nemo_opd.logging.metrics import merge
from nemo_opd.logits.planned import UnitLossRecorder
from nemo_opd.losses.arguments import chunk_lengths
from nemo_opd.losses.logit_metrics import AccuracyRecorder, with_calibration_error
from nemo_opd.losses.position_targets import POSITION_KINDS, position_kinds
from nemo_opd.types import Batch, Mean, Metric, PerText, Rows, Sum, TeacherRows, TokenRows

CLASSES = (
    "cjk",
    "other_script",
    "code",
    "word",
    "numeral",
    "punctuation",
    "white_space",
    "part_of_character",
    "special",
)
"""Names of the classes, by number. The lowest class among its characters is a text's class, and so of two texts
together. A part of a character has no complete character, `special` no text.
"""
_CJK, _OTHER_SCRIPT, _CODE, _WORD, _NUMERAL, _PUNCTUATION, _WHITE_SPACE, _PART, _SPECIAL = range(len(CLASSES))
_CODE_CHARACTERS = frozenset("{}[]<>=;_\\|&^~`$#@*/+")
"""Characters that are frequent in source code and rare in prose."""
_CJK_RANGES = (
    (0x1100, 0x11FF),
    (0x2E80, 0x9FFF),
    (0xAC00, 0xD7FF),
    (0xF900, 0xFAFF),
    (0xFF00, 0xFFEF),
    (0x20000, 0x3FFFF),
)
"""Han, kana, bopomofo and hangul, with their punctuation and full-width forms."""
_LATIN_RANGES = ((0, 0x24F), (0x300, 0x36F), (0x1E00, 0x1EFF), (0x2C60, 0x2C7F), (0xA720, 0xA7FF), (0xFB00, 0xFB06))
_DOMAIN, _CLASS, _CHUNK, _POSITION = "domain", "class", "chunk", "position"
_SHARE = "share"
"""Names of metrics: `<table>/<group>/<measure>`; with `<teacher>/` before the group for `chunk` and `position`."""
_CHUNK_KINDS = ("1:1", "1:n", "n:1", "n:m", "unaligned")
"""Kinds by the number of student and teacher tokens in a chunk; `unaligned` tokens are in no compared chunk."""
_ONE_TO_ONE, _ONE_TO_N, _N_TO_ONE, _N_TO_M, _UNALIGNED = range(len(_CHUNK_KINDS))
_NONE = -1
_ALL, _SHARED = "bits_per_byte", "shared_bits_per_byte"
"""Measures over all bytes that the student predicts, and over the bytes that all models predict."""
PER_TEXT = "per_text"
"""Name of the bits and bytes of each validation text."""
_SIZES = {_ALL: "bytes", _SHARED: "shared_bytes"}
"""Name of the number of bytes, by measure."""


def validate(models: _Evaluated, batches: Iterable[Batch]) -> dict[str, Metric]:
    """Return the student's metrics over all batches, each reduced by its own rule, with the bytes that they cover."""
    metrics = with_calibration_error(_without_empty(merge(models.evaluate(batch) for batch in batches)))
    sizes = {size: metrics[name] for name, size in _SIZES.items() if name in metrics}
    return metrics | {size: Sum(metric.count) for size, metric in sizes.items() if isinstance(metric, Mean)}


def validate_teachers(models: _Evaluated, batches: Iterable[Batch]) -> dict[str, Metric]:
    """Return `shared_bits_per_byte/<teacher>` on each teacher's tokens of the same texts, in total and by group."""
    return _without_empty(merge(models.evaluate_teachers(batch) for batch in batches))


def _without_empty(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """Drop the metrics of groups without tokens."""

    def is_empty(name: str, metric: Metric) -> bool:
        tables = (f"{_DOMAIN}/", f"{_CLASS}/", f"{_CHUNK}/", f"{_POSITION}/")
        if not name.startswith(tables) or not isinstance(metric, Mean):
            return False
        return not (metric.total if name.endswith(f"/{_SHARE}") else metric.count)

    return {name: metric for name, metric in metrics.items() if not is_empty(name, metric)}


class _Evaluated(Protocol):
    """Loaded student and teachers."""

    def evaluate(self, batch: Batch) -> Mapping[str, Metric]: ...

    def evaluate_teachers(self, batch: Batch) -> Mapping[str, Metric]: ...


@dataclass(frozen=True, slots=True)
class TokenLosses(Rows):
    """Losses at the student's tokens [B, S], 0 at tokens without one."""

    nats: Tensor
    """float64 [B, S]: −log p of scored tokens."""
    is_hit: Tensor
    """bool [B, S]: scored tokens that had the largest logit."""
    kd: tuple[Tensor, ...]
    """float64 [B, S] for each part of the KD: unweighted loss of each unit, at the unit's first token."""
    is_unit: tuple[Tensor, ...]
    """bool [B, S] for each part of the KD: True at the first token of a unit."""

    @staticmethod
    def of(recorded: Sequence[UnitLossRecorder], accuracy: AccuracyRecorder) -> TokenLosses:
        """Return the recorded losses; recorded: cross-entropy, then each part of the KD. Collective."""
        ce, *parts = recorded
        kd, is_unit = tuple(part.losses() for part in parts), tuple(part.is_unit() for part in parts)
        return TokenLosses(ce.losses(), accuracy.hits(), kd, is_unit)

    def widened(self, width: int) -> TokenLosses:
        """Return a copy, padded to `width` positions."""
        return self.map(lambda tensor, fill: F.pad(tensor, (0, width - tensor.shape[1]), value=fill))


def joined_losses(parts: Sequence[TokenLosses]) -> TokenLosses:
    """Concatenate the losses of consecutive sequences, on the host."""
    width = max(part.nats.shape[1] for part in parts)
    padded = [part.widened(width) for part in parts]

    def join(*tensors: Tensor) -> Tensor:
        return torch.cat(tensors).cpu()

    return TokenLosses(
        join(*(part.nats for part in padded)),
        join(*(part.is_hit for part in padded)),
        tuple(map(join, *(part.kd for part in padded))),
        tuple(map(join, *(part.is_unit for part in padded))),
    )


@dataclass(frozen=True)
class TokenGroups:
    """The groupings of tokens in a run's validation."""

    teachers: tuple[str, ...]
    parts: tuple[tuple[str | None, int], ...]
    """Name and teacher index of each part of the KD."""
    classes: Tensor
    """uint8 [V]: class of each student id."""
    domains: tuple[str, ...] = ()

    def of_student(self, batch: Batch, losses: TokenLosses) -> dict[str, Metric]:
        """Return share of tokens, cross-entropy, accuracy, bits per byte and per shared byte, and each teacher's KD by
        group.
        """
        student, metrics = batch.student, dict[str, Metric]()
        for table in self._tables(batch):
            is_counted = student.loss_mask & (table.labels != _NONE)
            tokens = _sums(table, table.labels, is_counted, is_counted)
            nats = _sums(table, table.labels, is_counted, losses.nats)
            metrics |= _means(table, _SHARE, tokens, tokens.sum().expand_as(tokens))
            metrics |= _means(table, "ce", nats, tokens)
            metrics |= _means(table, "accuracy", _sums(table, table.labels, is_counted, losses.is_hit), tokens)
            metrics |= _bits_per_byte(table, _ALL, table.labels, student, losses.nats)
            if batch.shared_bytes is not None:
                metrics |= _bits_per_byte(table, _SHARED, table.shared_labels, batch.shared_student, losses.nats)
            for (name, teacher), kd, is_unit in zip(self.parts, losses.kd, losses.is_unit, strict=True):
                if teacher in table.teachers:
                    units = _sums(table, table.shared_labels, is_unit, is_unit)
                    measure = "kd" if name is None else f"kd/{name}"
                    metrics |= _means(table, measure, _sums(table, table.shared_labels, is_unit, kd), units)
        return metrics

    def of_teachers(self, batch: Batch, nats: Sequence[Tensor]) -> dict[str, Metric]:
        """Return each teacher's bits per shared byte for each group.

        nats: float64 [B, T] for each teacher, −log p of tokens with bytes.
        """
        metrics: dict[str, Metric] = {}
        for table in self._tables(batch):
            for i in table.teachers:
                rows = batch.teachers[i]
                labels = _at_teacher(table.shared_labels, rows)
                metrics |= _bits_per_byte(table, f"{_SHARED}/{self.teachers[i]}", labels, rows.tokens, nats[i])
        return metrics

    def _tables(self, batch: Batch) -> Iterator[_Table]:
        all_teachers = range(len(self.teachers))
        if batch.domain is not None:
            labels = batch.domain.unsqueeze(1).expand_as(batch.student.ids)
            yield _Table(_DOMAIN, self.domains, labels, labels, all_teachers)
        token_classes = self.classes.long()[batch.student.ids]
        yield _Table(_CLASS, CLASSES, token_classes, _stretch_classes(batch, token_classes), all_teachers)
        for i, rows in enumerate(batch.teachers):
            if rows.chunks is not None:
                labels = _chunk_kinds(rows.chunks.student, rows.chunks.teacher)
                is_read = (rows.tokens.lengths > 0).unsqueeze(1)
                labels = labels.where(is_read, _NONE)
                yield _Table(f"{_CHUNK}/{self.teachers[i]}", _CHUNK_KINDS, labels, labels, (i,))
                kinds = position_kinds(rows.chunks, batch.student, rows.tokens).where(is_read, _NONE)
                yield _Table(f"{_POSITION}/{self.teachers[i]}", POSITION_KINDS, kinds, kinds, ())


@dataclass(frozen=True, slots=True)
class _Table:
    """One grouping of a batch's tokens."""

    prefix: str
    names: tuple[str, ...]
    labels: Tensor
    """int64 [B, S]: group of each student token, −1 for none; for the student's figures, whatever the teachers."""
    shared_labels: Tensor
    """The same for figures that student and teachers have in common."""
    teachers: Sequence[int]
    """Teachers that are compared in this table."""


def _stretch_classes(batch: Batch, token_classes: Tensor) -> Tensor:
    """Return the class of each token's stretch between places where all models cut: int64 [B, S]."""
    opens = torch.ones_like(token_classes, dtype=torch.bool)
    for rows in batch.teachers:
        if rows.chunks is not None:
            chunk = rows.chunks.student
            opens[:, 1:] &= (chunk[:, 1:] != chunk[:, :-1]) | (chunk[:, 1:] < 0)
    stretch = opens.long().cumsum(1) - 1
    # The class of a text is the lowest class of its characters.
    lowest = torch.full_like(token_classes, len(CLASSES)).scatter_reduce(1, stretch, token_classes, "amin")
    return lowest.gather(1, stretch)


def _chunk_kinds(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the kind of each student token's chunk: chunk ids [B, S] and [B, T] → int64 [B, S]."""
    m, n = chunk_lengths(student, student), chunk_lengths(teacher, student)
    kinds = torch.full_like(m, _N_TO_M)
    kinds[(m > 1) & (n == 1)] = _N_TO_ONE
    kinds[(m == 1) & (n > 1)] = _ONE_TO_N
    kinds[(m == 1) & (n == 1)] = _ONE_TO_ONE
    kinds[(student < 0) | (n == 0)] = _UNALIGNED
    return kinds


def _at_teacher(labels: Tensor, rows: TeacherRows) -> Tensor:
    """Move labels [B, S] to the teacher's tokens: int64 [B, T], −1 for tokens that the student does not read."""
    width = rows.tokens.ids.shape[1]
    if rows.chunks is not None:
        ours, theirs = rows.chunks.student.long() + 1, rows.chunks.teacher.long() + 1
        by_chunk = torch.full((len(labels), 1 + int(max(ours.max(), theirs.max()))), _NONE)
        by_chunk.scatter_(1, ours, labels)
        by_chunk[:, 0] = _NONE
        return by_chunk.gather(1, theirs)
    if rows.moved is None:
        return F.pad(labels, (0, width - labels.shape[1]), value=_NONE)
    place = torch.arange(width).unsqueeze(0) - rows.moved.by.unsqueeze(1)
    moved_labels = labels.gather(1, place.clamp(0, labels.shape[1] - 1))
    return moved_labels.where((place >= 0) & (place < labels.shape[1]), _NONE)


def _bits_per_byte(table: _Table, measure: str, labels: Tensor, tokens: TokenRows, nats: Tensor) -> dict[str, Metric]:
    has_bytes = tokens.loss_mask & (tokens.num_bytes > 0) & (labels != _NONE)
    bits, num_bytes = (_sums(table, labels, has_bytes, values) for values in (nats / math.log(2), tokens.num_bytes))
    return _means(table, measure, bits, num_bytes)


def _sums(table: _Table, labels: Tensor, is_counted: Tensor, values: Tensor) -> Tensor:
    """Sum the counted values [B, S] of each group: float64 [groups]."""
    is_counted = is_counted & (labels != _NONE)
    sums = torch.zeros(len(table.names), dtype=torch.float64)
    return sums.index_add_(0, labels[is_counted], values[is_counted].double())


def _means(table: _Table, measure: str, totals: Tensor, counts: Tensor) -> dict[str, Metric]:
    """Return the mean of each group, also of empty ones, so that all batches have the same metrics."""
    groups = zip(table.names, totals.tolist(), counts.tolist(), strict=True)
    return {f"{table.prefix}/{name}/{measure}": Mean(total, count) for name, total, count in groups}


def shared_bits_per_byte(batch: Batch, nats: Tensor) -> dict[str, Metric]:
    """Return the student's `shared_bits_per_byte`; nothing without teachers. nats: float64 [B, S], −log p of tokens."""
    if batch.shared_bytes is None:
        return {}
    bits = nats[batch.shared_bytes > 0].sum() / math.log(2)
    return {_SHARED: Mean(float(bits), int(batch.shared_bytes.sum()))}


def per_text(batch: Batch, nats: Tensor) -> dict[str, Metric]:
    """Return the student's bits and bytes of each text. nats: float64 [B, S], −log p of tokens."""
    student = batch.student
    num_bytes = (student.num_bytes * student.loss_mask)[:, 1:]
    bits = (nats[:, 1:] * (num_bytes > 0)).sum(1) / math.log(2)
    return {PER_TEXT: PerText(tuple(bits.tolist()), tuple(num_bytes.sum(1).tolist()))}


def teachers_bits_per_byte(batch: Batch, nats: Sequence[Tensor], names: Sequence[str]) -> dict[str, Metric]:
    """Return `shared_bits_per_byte/<teacher>`. nats: float64 [B, T] for each teacher, −log p of tokens with bytes."""
    metrics: dict[str, Metric] = {}
    for name, rows, teacher_nats in zip(names, batch.teachers, nats, strict=True):
        num_bytes = (rows.tokens.num_bytes * rows.tokens.loss_mask)[:, 1:].sum()
        metrics[f"{_SHARED}/{name}"] = Mean(float(teacher_nats.sum()) / math.log(2), int(num_bytes))
    return metrics


def token_classes(pieces: Pieces) -> NDArray[np.uint8]:
    """Return the class number of each id: [V]."""
    return np.array([class_of(piece) for piece in pieces.as_list()], np.uint8)


def class_of(text: bytes) -> int:
    """Return the number of a text's class, by its complete characters."""
    return min(map(_class_of_character, text.decode(errors="ignore")), default=_PART if text else _SPECIAL)


@cache
def _class_of_character(character: str) -> int:
    code, category = ord(character), unicodedata.category(character)
    if character.isspace():
        return _WHITE_SPACE
    if _is_in(code, _CJK_RANGES):
        return _CJK
    if character in _CODE_CHARACTERS:
        return _CODE
    if category.startswith("N"):
        return _NUMERAL
    if category.startswith(("L", "M")):
        return _WORD if _is_in(code, _LATIN_RANGES) else _OTHER_SCRIPT
    return _PUNCTUATION


def _is_in(code: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(first <= code <= last for first, last in ranges)
