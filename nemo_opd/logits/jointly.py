"""Terms that kernels compute together, to read rows and write their gradient as few times as possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nemo_opd.kernels import launch
from nemo_opd.kernels.joint import Placed, add_losses
from nemo_opd.logits.blocks import Step
from nemo_opd.logits.rows import Gradients, LogitRows
from nemo_opd.logits.term import Term


class JointTerms:
    """Terms that kernels can compute, in groups with at most one term of each form."""

    def __init__(self, source: LogitRows, terms: Sequence[Term], gradients: Gradients) -> None:
        self._terms = terms
        are_used = launch.are_used(source.device, source.dtype) and not gradients.pulls_back
        self._groups = _groups(terms) if are_used else []
        self.are_all = len(self._groups) == 1 and len(self._groups[0]) == len(terms)
        """One group holds all terms, so that each row of a block is computed once, in a single step."""

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __contains__(self, term: int) -> bool:
        return any(term in group for group in self._groups)

    def add(
        self, coefficients: Sequence[float], step: Step, logits: Tensor, total: Tensor
    ) -> Iterable[tuple[int, Tensor]]:
        """Yield each joint term's index and sums [2] over a step; add the gradients to `total`, the block's [R, X].

        Raises KernelError.
        """
        for group in self._groups:
            placed = {i: self._placed(i, coefficients[i], *step[i]) for i in group}
            placed = {i: form for i, form in placed.items() if len(form)}
            losses = add_losses(logits, list(placed.values()), total, is_first=self.are_all) if placed else []
            for i, unit_losses in zip(placed, losses, strict=True):
                yield i, self._terms[i].sums_of(unit_losses, step[i][0])

    def _placed(self, i: int, coefficient: float, units: slice, places: slice | Tensor) -> Placed:
        term = self._terms[i]
        assert term.row_loss is not None
        return Placed(term.row_loss.of(units), places, term.factors(units, coefficient, torch.float32), term.width)


def _groups(terms: Sequence[Term]) -> list[list[int]]:
    groups: list[dict[type, int]] = []
    """Index of the term, keyed by kind."""
    for i, term in enumerate(terms):
        if term.row_loss is None:
            continue
        kind = term.row_loss.kind
        group = next((group for group in groups if kind not in group), None)
        if group is None:
            groups.append(group := {})
        group[kind] = i
    return [list(group.values()) for group in groups]
