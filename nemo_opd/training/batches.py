"""Training batches: sampled by the student (methods.md §10), and read ahead by the teachers."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import compress, islice
from operator import not_

import torch

from nemo_opd.config.objective import GRPOLoss
from nemo_opd.config.run import RunConfig
from nemo_opd.data.collate import collate
from nemo_opd.data.loader import TrainLoader
from nemo_opd.data.order import BatchOrder
from nemo_opd.data.row_types import Prompt, Rollout
from nemo_opd.data.samples import Sample
from nemo_opd.logging.metrics import Timer
from nemo_opd.losses.policy_gradient import group_advantages, reward_weights
from nemo_opd.rollout.collect import Collector, chosen_share
from nemo_opd.rollout.engine_interface import Engine
from nemo_opd.training.models import InFlightBatch, Models, ScoredBatch
from nemo_opd.types import Batch, Closing, SampledRows


@dataclass(frozen=True)
class RolloutSteps:
    """Functions that make a batch."""

    prompts: Callable[[list[int]], Sequence[Prompt]]
    """Row indices → prompts."""
    collector: Collector
    from_dataset: Callable[[Prompt], Rollout]
    """Prompt → rollout with the dataset's response."""
    make_sample: Callable[[Rollout], Sample]
    rewards: Callable[[Sequence[Rollout]], list[float]] | None
    """Rollouts of a batch → their rewards, if the run has a reward."""


@dataclass(frozen=True, slots=True)
class _RolloutBatch:
    """Batch that the teachers have not read yet, with its rollouts."""

    batch: Batch
    rollouts: tuple[Rollout, ...]
    """Rollouts in row order; further rows of the batch are responses of the dataset."""
    rewards: tuple[float, ...]
    """One per rollout; empty without a reward."""
    version: int
    """Version of the weights that sampled the batch."""


class RolloutSource(Closing):
    """Source of training batches, each sampled when it is needed or, with `rollout.overlap`, one step earlier.

    The weights that sample are at most `rollout.staleness` optimizer steps older than the student's.
    """

    timed_as = "rollout_s"
    """Name of the timer span of waiting for a batch."""

    def __init__(self, config: RunConfig, order: BatchOrder, total_steps: int) -> None:
        """order: order of the prompts. total_steps: steps of the run; nothing is sampled beyond them."""
        assert config.rollout is not None
        self._config, self._rollout = config, config.rollout
        self._order = order
        self._num_batches, self._total_steps = 0, total_steps
        self._sampled: deque[_RolloutBatch] = deque()
        self._ahead: Future[_RolloutBatch] | None = None
        self._thread = ThreadPoolExecutor(1, "rollout")

    def connect(self, steps: RolloutSteps, engine: Engine) -> None:
        """Set the functions and the engine that make batches; called before the first batch."""
        self._steps, self._engine = steps, engine

    @property
    def epoch(self) -> int:
        return max(0, self._num_batches - 1) // self._order.steps_per_epoch

    def start(self) -> None:
        """Do nothing: sampling ahead needs the engine, which is not connected yet."""

    def next(self) -> Batch:
        """Return the next batch. Raises the errors of engine, environment and reward.

        Call after the student's updates on all earlier batches: their number is the version of its weights.
        """
        if self._ahead is None:
            self._follow(self._num_batches, lag=0)
            sampled = self._sample(self._num_batches)
            self._engine.rest()
        else:
            sampled = self._ahead.result()
        self._num_batches += 1
        self._sampled.append(sampled)
        if self._rollout.overlap:
            # Called before the update, so this sample is one version older when the student learns from it.
            self._follow(self._num_batches - 1, lag=1)
        self._sample_ahead()
        return sampled.batch

    def _follow(self, version: int, *, lag: int) -> None:
        """Give the engine the student's weights, which have `version`, if its own would be too old in `lag` steps."""
        if version + lag - self._engine.version > self._rollout.staleness:
            self._engine.follow(version)

    def _sample_ahead(self) -> None:
        has_more = self._num_batches < self._total_steps
        is_ahead = self._rollout.overlap and has_more
        self._ahead = self._thread.submit(self._sample, self._num_batches) if is_ahead else None

    def wait(self) -> None:
        """Wait until no sampling runs in the background: tokenizers are not thread-safe."""
        if self._ahead is not None:
            wait([self._ahead])

    def update_engine(self) -> None:
        """Wait until the engine is idle and give it the student's current weights."""
        self.wait()
        self._engine.follow(self._num_batches)

    def renew(self) -> None:
        """Sample the next batch again with the current weights, as a run that resumes from here does."""
        self.update_engine()
        self._engine.rest()
        self._sample_ahead()

    def take(self) -> _RolloutBatch:
        """Return the oldest batch that `take` has not returned yet."""
        return self._sampled.popleft()

    def _sample(self, position: int) -> _RolloutBatch:
        """Sample batch `position`, counted from 0."""
        version, steps = self._engine.version, self._steps
        prompts = steps.prompts(next(self._order.starting_at(position)))
        is_sampled = chosen_share(prompts, self._rollout.on_policy_share, self._config.run.seed, position)
        to_sample, from_dataset = list(compress(prompts, is_sampled)), list(compress(prompts, map(not_, is_sampled)))
        rollouts = steps.collector.collect(to_sample, self._rollout.n, position) if to_sample else []
        rewards = [] if steps.rewards is None else steps.rewards(rollouts)
        batch = collate(list(map(steps.make_sample, (*rollouts, *map(steps.from_dataset, from_dataset)))))
        batch = with_rollouts(batch, rollouts, from_dataset, rewards, self._config)
        return _RolloutBatch(batch, tuple(rollouts), tuple(rewards), version)

    def state_dict(self) -> dict[str, int]:
        return self._order.place(self._num_batches)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore a position. Raises CheckpointError if its settings of the prompts' order differ."""
        self._num_batches = self._order.num_batches_at(state)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def with_rollouts(
    batch: Batch,
    rollouts: Sequence[Rollout],
    from_dataset: Sequence[Prompt],
    rewards: Sequence[float],
    config: RunConfig,
) -> Batch:
    """Return the batch with the log-probabilities, advantages and weights of its rollouts (methods.md §10).

    The batch's first rows are `rollouts`, the rows after them the dataset's responses to the prompts in `from_dataset`.
    Weights by a teacher's likelihood are added later, by `weighted_by_confidence`.
    """
    num_rows, width = batch.student.ids.shape
    is_sampled = torch.arange(num_rows) < len(rollouts)
    logprobs, behaviour_logprobs = torch.zeros(2, num_rows, width)
    for row, rollout in enumerate(rollouts):
        logprobs[row, : len(rollout.ids)] = torch.from_numpy(rollout.logprobs)
        behaviour_logprobs[row, : len(rollout.ids)] = torch.from_numpy(rollout.behaviour_logprobs)
    prompts = torch.tensor([rollout.prompt.index for rollout in rollouts] + [prompt.index for prompt in from_dataset])
    reward_values = torch.tensor(rewards, dtype=torch.float64)
    advantages = torch.zeros(num_rows)
    if isinstance(config.loss, GRPOLoss):
        scale = config.loss.scale_advantages
        advantages[is_sampled] = group_advantages(reward_values, prompts[is_sampled], scale=scale).float()
    teachers = batch.teachers
    if config.reward is not None and (beta := config.reward.weighting_beta) is not None:
        weights = torch.ones(num_rows)
        weights[is_sampled] = reward_weights(reward_values, prompts[is_sampled], beta).float()
        teachers = tuple(replace(teacher, rollout_weights=weights) for teacher in teachers)
    sampled = SampledRows(is_sampled, logprobs, behaviour_logprobs, advantages, prompts)
    return replace(batch, teachers=teachers, sampled=sampled)


BatchSource = TrainLoader | RolloutSource
"""Endless, resumable source of training batches; a context manager."""


@dataclass(frozen=True, slots=True)
class _Queued:
    """A batch in flight and the source's state after it."""

    batch: InFlightBatch
    epoch: int
    state: dict[str, int]


class Lookahead:
    """Scored batches in source order; while the student trains on one, the teachers read the next `depth`.

    All waiting happens in the caller's thread, which gets all errors and signals. Batches in flight are dropped when a
    run ends early, and reread when it resumes.
    """

    def __init__(self, source: BatchSource, teachers: Models, *, depth: int, steps: range) -> None:
        """Store the arguments. depth: 0 if student and teachers take turns. steps: step numbers to read batches for."""
        self._source = source
        self._teachers = teachers
        self._depth = depth
        self._steps = iter(steps)
        self._queue: deque[_Queued] = deque()
        self._epoch = source.epoch
        self._state = source.state_dict()

    @property
    def epoch(self) -> int:
        """Epoch, counted from 0, of the last returned batch."""
        return self._epoch

    def state_dict(self) -> dict[str, int]:
        """Return the source's state after the last returned batch."""
        return self._state

    def next(self, timer: Timer) -> ScoredBatch:
        """Return the next scored batch. Raises errors of the source and the teachers.

        Times the source under its own name, and the teachers as `teacher_s` if they take turns with the student,
        otherwise as `teacher_wait_s`.
        """
        self._fill(1, timer)
        first = self._queue.popleft()
        with timer.span(self._wait):
            scored = self._teachers.collect(first.batch)
        self._epoch, self._state = first.epoch, first.state
        self._fill(self._depth, timer)
        return scored

    @property
    def _wait(self) -> str:
        return "teacher_wait_s" if self._depth else "teacher_s"

    def _fill(self, number: int, timer: Timer) -> None:
        """Submit batches until `number` are in flight or the steps run out."""
        for step in islice(self._steps, max(0, number - len(self._queue))):
            with timer.span(self._source.timed_as):
                batch = self._source.next()
            with timer.span(self._wait):
                in_flight = self._teachers.submit(batch, f"step {step}")
            self._queue.append(_Queued(in_flight, self._source.epoch, self._source.state_dict()))
