"""Validation metrics on held-out text."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from nemo_opd.evaluation.groups import without_empty
from nemo_opd.logging.metrics import merge
from nemo_opd.losses.accuracy import with_calibration_error
from nemo_opd.types import Batch, Metric


class _Evaluated(Protocol):
    """Loaded student and teachers."""

    def evaluate(self, batch: Batch) -> Mapping[str, Metric]: ...

    def evaluate_teachers(self, batch: Batch) -> Mapping[str, Metric]: ...


def validate(models: _Evaluated, batches: Iterable[Batch]) -> dict[str, Metric]:
    """Return the student's metrics over all batches, each reduced by its own rule."""
    return with_calibration_error(without_empty(merge(models.evaluate(batch) for batch in batches)))


def validate_teachers(models: _Evaluated, batches: Iterable[Batch]) -> dict[str, Metric]:
    """Return `bits_per_byte/<teacher>` on each teacher's tokens of the same texts, in total and for each group."""
    return without_empty(merge(models.evaluate_teachers(batch) for batch in batches))
