"""The group of workers of a model, for what student, teachers and evaluated models have in common."""

from collections.abc import Sequence
from typing import Any

import torch

from nemo_opd.cluster.base import Group
from nemo_opd.distributed.layout import Layout
from nemo_opd.evaluation.likelihoods import Scored, answers, batches, token_rows
from nemo_opd.progress import working
from nemo_opd.rollout.base import Completion, Request
from nemo_opd.rotary import RotaryLimit
from nemo_opd.training.batch_grid import leads, shared_out
from nemo_opd.training.micro_batches import micro_batches
from nemo_opd.types import TokenRows

_MICRO_BATCHES_A_CALL = 16
"""Microbatches of each rank that are read for a benchmark at a time."""


class ModelGroup:
    """A group of workers that reads and continues texts; data-parallel ranks divide them."""

    def __init__(self, group: Group, layout: Layout, budget: int) -> None:
        """budget: tokens of a microbatch of a rank."""
        self._group, self._layout, self._budget = group, layout, budget
        self._is_packed = all(group.call("reads_packed"))
        self._rotary: RotaryLimit | None = group.call("rotary_limit")[0]

    def micro_batches(self, by_rank: Sequence[TokenRows]) -> list[tuple[slice, ...]]:
        """Cut the sequences of each rank into microbatches."""
        lengths = [tokens.lengths.tolist() for tokens in by_rank]
        found = micro_batches(lengths, self._budget, is_packed=self._is_packed, rotary=self._rotary)
        return [tuple(cuts) for cuts in found]

    def likelihoods(self, rows: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Return likelihoods of sequences, in order (see `Scorer`)."""
        layout, found = self._layout, [(0.0, False)] * len(rows)
        with working("reading benchmarks", len(rows), "sequences") as work:
            for numbers, by_rank in batches(rows, layout.dp, self._budget * _MICRO_BATCHES_A_CALL):
                own = [token_rows(by_rank[layout.coordinates(rank)[0]]) for rank in range(layout.size)]
                arguments = list(zip(own, self.micro_batches(own), strict=True))
                answered = self._group.call("likelihoods", arguments, about="benchmarks")
                in_turn_by_rank = torch.stack([answered[rank] for rank in leads(layout)], dim=1).flatten(0, 1)
                for i, answer in zip(numbers, answers(in_turn_by_rank), strict=False):  # the rest is padding
                    found[i] = answer
                work.advance(len(numbers))
        return found

    def continued(self, requests: Sequence[Request], *more: object, about: str) -> list[Completion]:
        """Return the completions of requests, in order. more: arguments of `generate` for every rank."""
        arguments: list[tuple[Any, ...]] = [(part, *more) for part in shared_out(requests, self._layout)]
        by_rank: list[list[Completion]] = self._group.call("generate", arguments, about=about)
        return [completion for rank in leads(self._layout) for completion in by_rank[rank]]
