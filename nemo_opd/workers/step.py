"""A step of the student on one rank: its part of the batch, the terms of the objective, metrics and timing."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_opd.aggregation import PART
from nemo_opd.config.run import RunConfig
from nemo_opd.handoff.outputs import Window
from nemo_opd.types import Batch, Max, Mean, Metric, Metrics, Normalizers

POSITIONS = "positions"
"""Name of a step's metric: positions, including padding, that the student has read."""
IS_TAKEN = "is_taken"
"""Name of a step's metric: 1, or 0 if the step was not finite and changed nothing."""
PHASE = "phase/"
"""Prefix of the names of metrics with the seconds of a phase."""


@dataclass(frozen=True, slots=True)
class StudentStep:
    """This rank's part of a global batch."""

    batch: Batch
    windows: tuple[Window, ...]
    """Each teacher's output for this batch."""
    normalizers: Normalizers
    micro_batches: tuple[slice, ...]
    """Slices of consecutive sequences, one per forward and backward pass."""
    kd_scale: float
    """Extra factor of the distillation term, on top of `loss.kd_weight`."""
    compare_gradients: bool = False
    """Whether to compute the KD and CE gradients separately and log their comparison."""


@dataclass(frozen=True, slots=True)
class _ObjectiveTerm:
    """A weighted term of the objective."""

    name: str
    """`CE`, `teacher <name>` or `policy`."""
    weight: float
    metric: Mean
    """Unweighted value."""


def objective_terms(config: RunConfig, metrics: Metrics) -> list[_ObjectiveTerm]:
    """Collect the terms of the objective from metrics, which may be reduced over ranks or not."""
    loss, terms = config.loss, []
    if isinstance(ce := metrics.get("ce"), Mean):
        terms.append(_ObjectiveTerm("CE", loss.ce_weight, ce))
    for name, metric in metrics.items():
        if name.startswith(PART) and isinstance(metric, Mean):
            terms.append(_ObjectiveTerm(_teacher_name(config, int(name.removeprefix(PART))), loss.kd_weight, metric))
    if isinstance(policy := metrics.get("policy/loss"), Mean):
        terms.append(_ObjectiveTerm("policy", getattr(loss, "policy_weight", 0.0), policy))
    return terms


def _teacher_name(config: RunConfig, i: int) -> str:
    if config.aggregation.type == "averaged_logits":  # a single term
        return f"teachers {', '.join(config.active_names)} together"
    return f"teacher {config.active_names[i]}"


def is_finite_everywhere(terms: Sequence[_ObjectiveTerm], *grad_norms: Tensor) -> Tensor:
    """Return whether the gradient norms and all weighted terms are finite on every rank: bool scalar on the device.

    terms: this rank's terms. Communicates one all-reduce over all ranks; does not wait for the device.
    """
    device = grad_norms[0].device
    values = (*grad_norms, *(term.metric.total for term in terms if term.weight))
    wrong = [~torch.as_tensor(value, device=device).detach().isfinite() for value in values]
    is_wrong = torch.stack(wrong).any().float()
    dist.all_reduce(is_wrong)
    return is_wrong == 0


class Phases:
    """Seconds per phase since the last `take`; the outer phase excludes nested ones.

    On CUDA device time is measured: a phase only queues its kernels, so a host clock would charge their work to
    whichever phase waits for them. Each change of phase records an event, which takes microseconds; only `take` waits.
    """

    def __init__(self, device: str) -> None:
        self._now = _record_event if device == "cuda" else time.perf_counter
        self._open: list[str] = []
        self._changes: list[tuple[str | None, float | torch.cuda.Event]] = []
        """Phase that begins, or None outside any phase, and its start."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the body's time as `phase`, even if it raises."""
        self._open.append(phase)
        self._change()
        try:
            yield
        finally:
            self._open.pop()
            self._change()

    def begin(self) -> None:
        """Discard the time so far without waiting, for example after validation, which is not reported."""
        self._changes = []

    def take(self) -> dict[str, Max]:
        """Return all phases as `phase/<name>` and restart from zero. Call it outside any phase.

        On CUDA it waits until the device has finished the last phase, so call it when the host waits anyway, such as
        when reading a step's metrics.
        """
        changes, self._changes = self._changes, []
        seconds: dict[str, float] = {}
        for (phase, start), (_, end) in pairwise(changes):
            if phase is not None:
                seconds[phase] = seconds.get(phase, 0.0) + _seconds_between(start, end)
        return {f"{PHASE}{phase}": Max(duration) for phase, duration in seconds.items()}

    def _change(self) -> None:
        self._changes.append((self._open[-1] if self._open else None, self._now()))


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(start: Any, end: Any) -> float:
    if isinstance(end, torch.cuda.Event):
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    return float(end - start)


def with_numbers(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """Replace tensors in the metrics by numbers, with a single wait for the device."""
    values = {
        (name, field.name): getattr(metric, field.name) for name, metric in metrics.items() for field in fields(metric)
    }
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    if tensors:
        values |= zip(tensors, torch.stack([value.double() for value in tensors.values()]).tolist(), strict=True)
    numbers: dict[str, dict[str, Any]] = {name: {} for name in metrics}
    for (name, field_name), value in values.items():
        numbers[name][field_name] = float(value)
    return {name: replace(metric, **numbers[name]) for name, metric in metrics.items()}
