"""The terms of the objective, under user-facing names."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_opd.aggregation import PART
from nemo_opd.config.run import RunConfig
from nemo_opd.types import Mean, Metrics

IS_TAKEN = "is_taken"
"""Name of a step's metric: 1, or 0 if the step was not finite and changed nothing."""


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
