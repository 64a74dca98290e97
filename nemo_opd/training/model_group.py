"""Reading and sampling with a model's workers, shared by student, teachers and evaluated models."""

from collections.abc import Sequence
from typing import Any

import torch

from nemo_opd.cluster.base import Group
from nemo_opd.distributed.layout import Layout
from nemo_opd.evaluation.likelihoods import Scored, answers, batches, token_rows
from nemo_opd.progress import working
from nemo_opd.rollout.base import Completion, Request
from nemo_opd.rotary import RotaryLimit
from nemo_opd.training.batch_grid import dp_leader_ranks, shared_out
from nemo_opd.training.micro_batches import micro_batches
from nemo_opd.types import TokenRows

_MICRO_BATCHES_A_CALL = 16
"""Microbatches per rank in one call of a benchmark."""


class ModelGroup:
    """Group of workers that scores and continues texts, divided over its data-parallel ranks."""

    def __init__(self, group: Group, layout: Layout, budget: int) -> None:
        """budget: tokens of a microbatch on one rank."""
        self._group, self._layout, self._budget = group, layout, budget
        self._is_packed = all(group.call("reads_packed"))
        self._rotary: RotaryLimit | None = group.call("rotary_limit")[0]

    def micro_batches(self, by_rank: Sequence[TokenRows]) -> list[tuple[slice, ...]]:
        """Cut each rank's sequences into microbatches."""
        lengths = [tokens.lengths.tolist() for tokens in by_rank]
        cuts_by_rank = micro_batches(lengths, self._budget, is_packed=self._is_packed, rotary=self._rotary)
        return [tuple(cuts) for cuts in cuts_by_rank]

    def likelihoods(self, rows: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Return the likelihoods of sequences, in order (see `Scorer`)."""
        layout, results = self._layout, [(0.0, False)] * len(rows)
        with working("reading benchmarks", len(rows), "sequences") as work:
            for indices, by_dp in batches(rows, layout.dp, self._budget * _MICRO_BATCHES_A_CALL):
                by_rank = [token_rows(by_dp[layout.coordinates(rank)[0]]) for rank in range(layout.size)]
                arguments = list(zip(by_rank, self.micro_batches(by_rank), strict=True))
                answered = self._group.call("likelihoods", arguments, about="benchmarks")
                # `batches` deals sequences to ranks round-robin.
                in_order = torch.stack([answered[rank] for rank in dp_leader_ranks(layout)], dim=1).flatten(0, 1)
                for i, answer in zip(indices, answers(in_order), strict=False):  # further rows are padding
                    results[i] = answer
                work.advance(len(indices))
        return results

    def continued(self, requests: Sequence[Request], *more: object, about: str) -> list[Completion]:
        """Return the completions of requests, in order. more: further arguments of `generate` on every rank."""
        arguments: list[tuple[Any, ...]] = [(part, *more) for part in shared_out(requests, self._layout)]
        by_rank: list[list[Completion]] = self._group.call("generate", arguments, about=about)
        return [completion for rank in dp_leader_ranks(self._layout) for completion in by_rank[rank]]
