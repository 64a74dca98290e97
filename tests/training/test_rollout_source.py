"""Batches that the student samples: their prompts, the version of the weights, and the contents of a row."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from nemo_opd.config.run import RunConfig, from_dict
from nemo_opd.data.order import BatchOrder
from nemo_opd.data.row_types import Prompt, Rollout
from nemo_opd.data.samples import Sample, TeacherSample, Tokens
from nemo_opd.errors import CheckpointError, RolloutError
from nemo_opd.losses.arguments import label_mask, sampled_mask
from nemo_opd.training.batches import RolloutSource, RolloutSteps
from tests.config.settings import on_policy

NUM_PROMPTS, N = 10, 2
SERVER = {"type": "server", "n": N, "max_new_tokens": 16}


@dataclass
class FakeEngine:
    """An engine that records the versions that it follows."""

    version: int = 0
    retried: int = 0
    followed: list[int] = field(default_factory=list)
    rests: int = 0

    def follow(self, version: int) -> None:
        self.followed.append(version)
        self.version = version

    def rest(self) -> None:
        self.rests += 1


def rollout_of(prompt: Prompt, sample: int, version: int, response: str = "7") -> Rollout:
    ids = np.array([1, prompt.index, 10 + sample, 2], np.int32)
    mask = np.array([False, False, True, True])
    logprobs = np.where(mask, -0.5 - sample, 0).astype(np.float32)
    behaviour = np.where(mask, -0.25, 0).astype(np.float32)
    return Rollout(prompt, sample, ids, mask, logprobs, behaviour, np.array([[2, 4]]), (response,), (), "stop", version)


@dataclass
class FakeCollector:
    engine: FakeEngine

    def collect(self, prompts: Sequence[Prompt], n: int, step: int) -> list[Rollout]:
        return [rollout_of(prompt, sample, self.engine.version) for prompt in prompts for sample in range(n)]


def sample_of(rollout: Rollout) -> Sample:
    tokens = Tokens(rollout.ids, rollout.loss_mask, np.ones(len(rollout.ids), np.int32))
    return Sample(tokens, (TeacherSample(tokens, None),))


def order_of(config: RunConfig, num_prompts: int) -> BatchOrder:
    assert config.rollout is not None
    return BatchOrder(num_prompts, config.train.global_batch_size // config.rollout.n, config.run.seed, True)


def source_of(engine: FakeEngine, score: Any = None, total_steps: int = 100, **sections: Any) -> RolloutSource:
    config = config_of(**sections)
    source = RolloutSource(config, order_of(config, NUM_PROMPTS), total_steps)
    source.connect(
        RolloutSteps(
            lambda indices: [Prompt(i, f"{i}", answer="7", response="r") for i in indices],
            FakeCollector(engine),
            lambda prompt: rollout_of(prompt, 0, -1, "r"),
            sample_of,
            None if score is None else lambda rollouts: list(map(score, rollouts)),
        ),
        engine,
    )
    return source


def config_of(**sections: Any) -> RunConfig:
    rollout = {**SERVER, **sections.pop("rollout", {})}
    return from_dict(on_policy(train={"global_batch_size": 4 * N}, rollout=rollout, **sections))


def test_an_epoch_has_each_prompt_n_times() -> None:
    source = source_of(FakeEngine())
    batches = [source.next() for _ in range(3)]

    prompts = torch.cat([batch.sampled.prompts for batch in batches if batch.sampled is not None])
    assert torch.equal(prompts.bincount(minlength=NUM_PROMPTS), torch.full((NUM_PROMPTS,), N))
    assert [len(batch) for batch in batches] == [4 * N, 4 * N, 2 * N]
    assert source.epoch == 0
    source.next()
    assert source.epoch == 1


def test_rows_carry_the_engines_log_probabilities() -> None:
    batch = source_of(FakeEngine()).next()

    assert batch.sampled is not None
    assert batch.sampled.is_sampled.all()
    assert batch.sampled.logprobs.tolist() == [[0, 0, -0.5 - i % N, -0.5 - i % N] for i in range(4 * N)]
    assert batch.sampled.behaviour_logprobs.tolist() == [[0, 0, -0.25, -0.25]] * 4 * N
    assert torch.equal(sampled_mask(batch.student.loss_mask, batch.sampled), batch.student.loss_mask)
    assert not label_mask(batch).any()


def test_the_engine_follows_every_step() -> None:
    """Bug: a server that does not rest keeps the GPU that teachers and student need."""
    engine = FakeEngine()
    source = source_of(engine)
    versions = []
    for step in range(3):
        source.next()
        versions.append(source.take().version)
        assert engine.rests == step + 1
    source.renew()

    assert engine.rests == 4
    assert versions == [0, 1, 2]


@pytest.mark.parametrize(("staleness", "versions"), [(1, [0, 0, 2, 2, 4]), (2, [0, 0, 0, 3, 3])])
def test_weights_are_as_old_as_allowed(staleness: int, versions: list[int]) -> None:
    source = source_of(FakeEngine(), rollout={"staleness": staleness})
    sampled = []
    for _ in range(5):
        source.next()
        sampled.append(source.take().version)

    assert sampled == versions


def test_ahead_by_one_the_weights_are_one_step_old() -> None:
    engine = FakeEngine()
    with source_of(engine, total_steps=4, rollout={"staleness": 1, "overlap": True}) as source:
        versions = []
        for _ in range(4):
            source.next()
            versions.append(source.take().version)
        assert source._ahead is None, "nothing is sampled after the last step"

    assert versions == [0, 0, 1, 2]


def test_a_checkpoint_is_a_fresh_start_for_the_engine() -> None:
    """Catches an uninterrupted run that samples with other weights than a run resumed from the checkpoint."""
    engine = FakeEngine()
    with source_of(engine, rollout={"staleness": 1, "overlap": True}) as source:
        for _ in range(3):
            source.next()
            source.take()
        place = source.state_dict()
        source.renew()
        source.next()
        assert source.take().version == 3

    resumed = source_of(FakeEngine(version=3), rollout={"staleness": 1, "overlap": True})
    with resumed as source:
        source.load_state_dict(place)
        source.next()
        assert source.take().version == 3


def test_an_error_while_sampling_ahead_is_raised_by_the_next_batch() -> None:
    def reward(rollout: Rollout) -> float:
        raise RolloutError("no number")

    with (
        source_of(
            FakeEngine(), reward, reward={"type": "numeric"}, rollout={"staleness": 1, "overlap": True}
        ) as source,
        pytest.raises(RolloutError, match="no number"),
    ):
        source.next()


def test_a_share_comes_from_the_dataset() -> None:
    source = source_of(FakeEngine(), rollout={"on_policy_share": 0.5}, data={"response_key": "response"})
    batch = source.next()

    assert batch.sampled is not None
    assert batch.sampled.is_sampled.tolist() == [True] * 2 * N + [False] * 2
    assert len(batch.sampled.prompts.unique()) == 4
    assert label_mask(batch).any(1).tolist() == [False] * 2 * N + [True] * 2


def test_rewards_become_advantages_and_weights() -> None:
    def reward(rollout: Rollout) -> float:
        return float(rollout.sample)

    numeric = {"type": "numeric"}
    batch = source_of(FakeEngine(), reward, reward=numeric, loss={"type": "grpo", "scale_advantages": False}).next()
    assert batch.sampled is not None
    assert batch.sampled.advantages.tolist() == [-0.5, 0.5] * 4
    assert batch.teachers[0].rollout_weights is None

    batch = source_of(FakeEngine(), reward, reward=numeric | {"weighting_beta": 2.0}).next()
    expected = 2 * torch.tensor([0.0, 0.5]).softmax(0)
    weights = batch.teachers[0].rollout_weights
    assert weights is not None
    torch.testing.assert_close(weights, expected.repeat(4))


def test_a_state_of_other_prompts_is_refused() -> None:
    source = source_of(FakeEngine())
    with pytest.raises(CheckpointError, match="num_documents=10"):
        RolloutSource(config_of(), order_of(config_of(), 11), 1).load_state_dict(source.state_dict())
