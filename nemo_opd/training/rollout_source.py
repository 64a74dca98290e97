"""Training batches that the student samples itself (methods.md §10)."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import compress
from operator import not_
from typing import Self

import torch

from nemo_opd.config.loss import GRPOLoss
from nemo_opd.config.run import RunConfig
from nemo_opd.data.collate import collate
from nemo_opd.data.order import BatchOrder
from nemo_opd.data.record import Prompt, Rollout
from nemo_opd.data.samples import Sample
from nemo_opd.losses.rollout_weights import group_advantages, reward_weights
from nemo_opd.progress import tracked
from nemo_opd.rollout.base import Engine
from nemo_opd.rollout.collect import Collector, chosen_share
from nemo_opd.types import Batch, SampledRows


@dataclass(frozen=True, slots=True)
class Collected:
    """A batch before its teachers have read it."""

    batch: Batch
    rollouts: tuple[Rollout, ...]
    """Sampled by the student, in the order of the rows; those of the dataset are behind them."""
    rewards: tuple[float, ...]
    """Of each rollout; empty without a reward."""
    version: int
    """Of the weights that sampled."""


@dataclass(frozen=True)
class Parts:
    """What makes a batch of prompts."""

    prompts: Callable[[list[int]], Sequence[Prompt]]
    """By the indices of their rows."""
    collector: Collector
    from_dataset: Callable[[Prompt], Rollout]
    """With the continuation that the dataset has."""
    make_sample: Callable[[Rollout], Sample]
    rewards: Callable[[Iterable[Rollout]], list[float]] | None
    """Of the rollouts of a batch."""


class RolloutSource:
    """Prompts in the order of BatchOrder; each batch is sampled when it is asked for, or one ahead.

    Weights that sample are at most `rollout.staleness` optimizer steps behind the student's.
    """

    timed_as = "rollout_s"

    def __init__(self, config: RunConfig, num_prompts: int, total_steps: int) -> None:
        """total_steps: of the run; nothing is sampled ahead of its last."""
        assert config.rollout is not None
        self._config, self._rollout = config, config.rollout
        per_batch = config.train.global_batch_size // config.rollout.n
        self._order = BatchOrder(num_prompts, per_batch, config.run.seed, config.data.shuffle)
        self._num_batches, self._total_steps = 0, total_steps
        self._collected: deque[Collected] = deque()
        self._ahead: Future[Collected] | None = None
        self._thread = ThreadPoolExecutor(1, "rollout")

    def connect(self, parts: Parts, engine: Engine) -> None:
        """What it samples with; before the first batch."""
        self._parts, self._engine = parts, engine

    @property
    def steps_per_epoch(self) -> int:
        return self._order.steps_per_epoch

    @property
    def epoch(self) -> int:
        return max(0, self._num_batches - 1) // self.steps_per_epoch

    def start(self) -> None:
        """There is no engine yet to read ahead with."""

    def next(self) -> Batch:
        """The next batch. Raises what engine, environment and reward raise.

        Called when the student has seen all batches before this one, so their number is the version of its weights.
        """
        if self._ahead is None:
            self._follow(self._num_batches, lag=0)
            collected = self._made(self._num_batches)
        else:
            collected = self._ahead.result()
        self._num_batches += 1
        self._collected.append(collected)
        if self._rollout.overlap:
            # The update is yet to come, so what is sampled now is for a student one step further.
            self._follow(self._num_batches - 1, lag=1)
        self._sample_ahead()
        return collected.batch

    def _follow(self, version: int, *, lag: int) -> None:
        """Give the engine the student's weights, of `version`, where its own would be too old in `lag` steps."""
        if version + lag - self._engine.version > self._rollout.staleness:
            self._engine.follow(version)

    def _sample_ahead(self) -> None:
        has_more = self._num_batches < self._total_steps
        self._ahead = self._thread.submit(self._made, self._num_batches) if self._rollout.overlap and has_more else None

    def wait(self) -> None:
        """Until nothing is being sampled: tokenizers cannot be used by two threads at once."""
        if self._ahead is not None:
            wait([self._ahead])

    def settle(self) -> None:
        """Have the engine idle, with the student's weights as they are, whose version is the number of batches."""
        self.wait()
        self._engine.follow(self._num_batches)

    def renew(self) -> None:
        """Sample on with the student's weights as they are, as a run does that continues from here."""
        self.settle()
        self._sample_ahead()

    def take(self) -> Collected:
        """What the oldest batch was made of that was not yet asked about."""
        return self._collected.popleft()

    def _made(self, position: int) -> Collected:
        """Batch `position`, counted from 0."""
        version = self._engine.version
        prompts = self._parts.prompts(next(self._order.starting_at(position)))
        is_own = chosen_share(prompts, self._rollout.on_policy_share, self._config.run.seed, position)
        own, others = list(compress(prompts, is_own)), list(compress(prompts, map(not_, is_own)))
        rollouts = self._parts.collector.collect(own, self._rollout.n, position) if own else []
        judged = tracked(rollouts, "rewarding", "rollouts")
        rewards = [] if self._parts.rewards is None else self._parts.rewards(judged)
        sequences = [*rollouts, *map(self._parts.from_dataset, others)]
        batch = collate([self._parts.make_sample(sequence) for sequence in sequences])
        return Collected(
            with_rollouts(batch, rollouts, others, rewards, self._config), tuple(rollouts), tuple(rewards), version
        )

    def state_dict(self) -> dict[str, int]:
        return self._order.place(self._num_batches)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to where the state was taken. Raises CheckpointError when that was with other prompts."""
        self._num_batches = self._order.num_batches_at(state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown(cancel_futures=True)


def with_rollouts(
    batch: Batch, rollouts: Sequence[Rollout], others: Sequence[Prompt], rewards: Sequence[float], config: RunConfig
) -> Batch:
    """A batch of these rollouts, and of the dataset's sequences of other prompts behind, with what is known of them."""
    num_rows, width = batch.student.ids.shape
    own = slice(len(rollouts))
    logprobs, behaviour_logprobs = torch.zeros(2, num_rows, width)
    for row, rollout in enumerate(rollouts):
        logprobs[row, : len(rollout.ids)] = torch.from_numpy(rollout.logprobs)
        behaviour_logprobs[row, : len(rollout.ids)] = torch.from_numpy(rollout.behaviour_logprobs)
    prompts = torch.tensor([rollout.prompt.index for rollout in rollouts] + [prompt.index for prompt in others])
    paid = torch.tensor(rewards, dtype=torch.float64)
    advantages = torch.zeros(num_rows)
    if isinstance(config.loss, GRPOLoss):
        scale = config.loss.scale_advantages
        advantages[own] = group_advantages(paid, prompts[own], scale=scale).float()
    teachers = batch.teachers
    if config.reward is not None and (beta := config.reward.weighting_beta) is not None:
        weights = torch.ones(num_rows)
        weights[own] = reward_weights(paid, prompts[own], beta).float()
        teachers = tuple(replace(teacher, rollout_weights=weights) for teacher in teachers)
    is_sampled = torch.arange(num_rows) < len(rollouts)
    sampled = SampledRows(is_sampled, logprobs, behaviour_logprobs, advantages, prompts)
    return replace(batch, teachers=teachers, sampled=sampled)
