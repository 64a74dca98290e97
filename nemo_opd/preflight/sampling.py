"""Batches of sequences that the workers sample together."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_opd.config.on_policy import longest_prompt
from nemo_opd.config.rollout import HFRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher, Teacher
from nemo_opd.rollout.base import BatchLimit


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Batch of sequences that are sampled together."""

    rows: int
    """Number of sequences."""
    prompt: int
    """Tokens of the longest prompt; all prompts are padded to it."""
    new: int
    """Tokens of the longest continuation."""

    @property
    def limit(self) -> BatchLimit:
        """The same number of sequences and tokens as a limit; longer sequences get smaller batches."""
        return BatchLimit(self.rows, self.rows * (self.prompt + self.new))


def student_batch(config: RunConfig, dp: int) -> SamplingBatch | None:
    """Return the student's largest batch of rollouts or answers on one of `dp` data-parallel ranks.

    None if its workers sample nothing.
    """
    rollout, evaluation = config.rollout, config.evaluation
    if isinstance(rollout, HFRollout):
        rows, new = rollout.batch_size, rollout.max_new_tokens
        if evaluation is None:
            rows = min(rows, -(-config.train.global_batch_size // dp))
    elif rollout is None and evaluation is not None:
        rows, new = evaluation.batch_size, 1
    else:
        return None
    return _batch(config, rows, max(new, _longest_answer(config)), config.train.max_length)


def teacher_batch(config: RunConfig, teacher: Teacher) -> SamplingBatch | None:
    """Return a teacher's largest batch of answers, or None if teachers are not asked."""
    if config.evaluation is None or not config.evaluation.teachers:
        return None
    max_length = teacher.max_length if isinstance(teacher, CrossTokenizerTeacher) else None
    longest = max_length or config.train.max_length
    return _batch(config, config.evaluation.teacher_batch_size, _longest_answer(config), longest)


def _longest_answer(config: RunConfig) -> int:
    return 1 if config.evaluation is None else max(map(config.new_tokens, config.evaluation.all_sets or [""]))


def _batch(config: RunConfig, rows: int, new: int, longest: int) -> SamplingBatch:
    """Return a batch of `rows` sequences with at most `longest` of the model's tokens.

    The prompt's length is the student's times longest / `train.max_length`; with an environment, all but one token:
    a later turn's prompt may leave room for just one.
    """
    scaled = -(-longest_prompt(config) * longest // config.train.max_length)
    prompt = longest - 1 if config.environment is not None else min(longest - 1, scaled)
    return SamplingBatch(rows, prompt, min(new, longest - 1))
