"""Memory of transformers' `generate` in a worker: the student's rollouts, a teacher's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_opd.config.model import Student
from nemo_opd.config.on_policy import longest_prompt
from nemo_opd.config.rollout import HFRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.rollout.base import BatchLimit
from nemo_opd.training.memory.activations import Work, working_bytes
from nemo_opd.training.memory.parts import Part, Phase, part
from nemo_opd.training.memory.situation import ModelSetup
from nemo_opd.training.memory.size import LayerSize

_BYTES_PER_LOGIT = 36
"""Bytes per logit for sampling a token: logits in fp32 and warped, probabilities, their sums in fp64, masks."""
PART_NAMES = (
    "parameters, gathered whole",
    "key-value cache",
    "activations of sampling",
    "logits and what is drawn from them",
)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The largest batch that a rank samples at a time."""

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

    @property
    def length(self) -> int:
        """Number of positions in the cache at the end; the last token is never read."""
        return self.prompt + self.new - 1


def rollouts(config: RunConfig, dp: int) -> SamplingBatch:
    """Return the student's largest batch of rollouts and questions."""
    rollout, questions = config.rollout, config.evaluation
    if questions is None:
        assert isinstance(rollout, HFRollout)
        rows = min(rollout.batch_size, -(-config.train.global_batch_size // dp))
        return sampling_batch(config, rows, rollout.max_new_tokens, config.train.max_length)
    rows, new = questions.batch_size, 1
    if isinstance(rollout, HFRollout):
        rows, new = rollout.batch_size, rollout.max_new_tokens
    return sampling_batch(config, rows, max(new, longest_answer(config)), config.train.max_length)


def student_limit(config: RunConfig) -> BatchLimit:
    """Return the limits of what a rank of the student samples at a time."""
    return rollouts(config, 1).limit


def longest_answer(config: RunConfig) -> int:
    """Return the most tokens of an answer to a question."""
    assert config.evaluation is not None
    return max(map(config.new_tokens, config.evaluation.all_sets or [""]))


def sampling_batch(config: RunConfig, rows: int, new: int, longest: int) -> SamplingBatch:
    """Return a batch of prompts and continuations, in tokens of which a sequence has at most `longest`.

    A prompt's length is the student's times longest / `train.max_length`; the prompt of a later turn may leave only one
    token.
    """
    scaled = -(-longest_prompt(config) * longest // config.train.max_length)
    prompt = longest - 1 if config.environment is not None else min(longest - 1, scaled)
    return SamplingBatch(rows, prompt, min(new, longest - 1))


def sampling_parts(
    owner: str,
    phase: Phase,
    setup: ModelSetup,
    model: Student | Teacher,
    compute_bytes: int,
    batches: Sequence[SamplingBatch],
) -> list[Part]:
    """Return the parts of the largest batch: of these, or a benchmark's longest question, which may be alone in one."""
    if setup.longest_question:
        batches = [*batches, SamplingBatch(1, setup.longest_question - 1, 1)]
    parts = (_batch_parts(owner, phase, setup, model, compute_bytes, batch) for batch in batches)
    return max(parts, key=lambda own: sum(each.at(phase) for each in own), default=[])


def _batch_parts(
    owner: str, phase: Phase, setup: ModelSetup, model: Student | Teacher, compute_bytes: int, batch: SamplingBatch
) -> list[Part]:
    """Return the parts of the larger of two moments: reading the prompts, or sampling the last token.

    At the second, a copy of one layer's keys, which grow by copying, counts as activations.
    """
    size, c, layers = setup.size, compute_bytes, setup.size.layers
    # Each rank of a context-parallel group samples whole sequences.
    work = Work(batch.rows, batch.prompt, 1, setup.layout.tp, sequence_parallel=False, compute_bytes=c)
    logits = batch.rows * size.vocab_size * _BYTES_PER_LOGIT
    prompts = cache_bytes(setup, c, batch.rows, batch.prompt, is_read=False)
    end = cache_bytes(setup, c, batch.rows, batch.length)
    moments = (prompts, working_bytes(size, work), 0), (end, end // (2 * len(layers)), logits)
    gathered = c * setup.whole if setup.is_sharded(model, c) else 0
    num_bytes = (gathered, *max(moments, key=sum))
    return [part(owner, name, each, phase) for name, each in zip(PART_NAMES, num_bytes, strict=True)]


def cache_bytes(setup: ModelSetup, compute_bytes: int, rows: int, length: int, *, is_read: bool = True) -> int:
    """Return the keys and values of all layers, exact to the byte for plain attention.

    is_read: the prompt has been read; until then layers with a sliding window keep it whole. Layers that keep less
    (linear attention, compressed keys) count like all others.
    """

    def kept(layer: LayerSize) -> int:
        return min(length, layer.window or length) if is_read else length

    numbers = sum(2 * layer.key_width * kept(layer) for layer in setup.size.layers)
    return rows * numbers * compute_bytes // setup.layout.tp


def samples_in_workers(config: RunConfig) -> bool:
    """Return whether the student samples in its own workers: rollouts, or answers of an off-policy run."""
    if config.rollout is None:
        return config.evaluation is not None
    return isinstance(config.rollout, HFRollout)


def rollout_parts(config: RunConfig, setup: ModelSetup, compute_bytes: int) -> list[Part]:
    """Return the parts of the student's rollouts and benchmarks; none where another engine does all of that."""
    batches = [rollouts(config, setup.layout.dp)] if samples_in_workers(config) else []
    return sampling_parts("student", Phase.ROLLOUT, setup, config.student, compute_bytes, batches)
