"""Loss and bits per byte on held-out text."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from nemo_opd.logging.metrics import merge
from nemo_opd.types import Batch, Mean, Metric


class _Evaluated(Protocol):
    """The loaded student and its teachers."""

    def evaluate(self, batch: Batch) -> Mapping[str, Metric]: ...

    def teachers_bits_per_byte(self, batch: Batch) -> list[Mean]: ...


def validate(models: _Evaluated, batches: Iterable[Batch]) -> dict[str, Metric]:
    """Return the student's metrics over all batches, each reduced by its own rule."""
    return merge(models.evaluate(batch) for batch in batches)


def validate_teachers(models: _Evaluated, batches: Iterable[Batch]) -> list[float]:
    """Return the bits per byte of every teacher, on its own tokens of the same texts."""
    totals: list[Mean] = []
    for batch in batches:
        parts = models.teachers_bits_per_byte(batch)
        totals = [total.merge(part) for total, part in zip(totals, parts, strict=True)] if totals else parts
    return [total.value() for total in totals]
