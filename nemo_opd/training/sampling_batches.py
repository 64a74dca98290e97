"""The largest batches that a rank samples at a time: the student's rollouts and answers, a teacher's answers."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_opd.config.on_policy import longest_prompt
from nemo_opd.config.rollout import HFRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher, Teacher
from nemo_opd.rollout.base import BatchLimit


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sequences that are sampled together."""

    rows: int
    """Number of sequences."""
    prompt: int
    """Length of the longest prompt, to which all are padded."""
    new: int
    """Number of tokens of the longest continuation."""

    @property
    def limit(self) -> BatchLimit:
        """Limits that a batch of longer sequences has too."""
        return BatchLimit(self.rows, self.rows * (self.prompt + self.new))


def student_samples(config: RunConfig) -> bool:
    """Return whether the student samples in its own workers: rollouts, or answers of an off-policy run."""
    if config.rollout is None:
        return config.evaluation is not None
    return isinstance(config.rollout, HFRollout)


def teachers_answer(config: RunConfig) -> bool:
    """Return whether teachers answer the evaluation's questions."""
    return config.evaluation is not None and config.evaluation.teachers and bool(config.active_teachers)


def student_batch(config: RunConfig, dp: int) -> SamplingBatch:
    """Return the student's largest batch of rollouts and questions on one of `dp` data-parallel ranks."""
    rollout, questions, longest = config.rollout, config.evaluation, config.train.max_length
    if questions is None:
        assert isinstance(rollout, HFRollout)
        rows = min(rollout.batch_size, -(-config.train.global_batch_size // dp))
        return _batch(config, rows, rollout.max_new_tokens, longest)
    rows, new = questions.batch_size, 1
    if isinstance(rollout, HFRollout):
        rows, new = rollout.batch_size, rollout.max_new_tokens
    return _batch(config, rows, max(new, _longest_answer(config)), longest)


def teacher_batch(config: RunConfig, settings: Teacher) -> SamplingBatch:
    """Return a teacher's largest batch of questions."""
    assert config.evaluation is not None
    own = settings.max_length if isinstance(settings, CrossTokenizerTeacher) else None
    rows, longest = config.evaluation.teacher_batch_size, own or config.train.max_length
    return _batch(config, rows, _longest_answer(config), longest)


def _longest_answer(config: RunConfig) -> int:
    assert config.evaluation is not None
    return max(map(config.new_tokens, config.evaluation.all_sets or [""]))


def _batch(config: RunConfig, rows: int, new: int, longest: int) -> SamplingBatch:
    """Return a batch whose sequences have at most `longest` of the model's tokens.

    A prompt's length is the student's times longest / `train.max_length`; the prompt of a later turn may leave only one
    token.
    """
    scaled = -(-longest_prompt(config) * longest // config.train.max_length)
    prompt = longest - 1 if config.environment is not None else min(longest - 1, scaled)
    return SamplingBatch(rows, prompt, min(new, longest - 1))
