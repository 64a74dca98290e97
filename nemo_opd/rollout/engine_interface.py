"""Interfaces of rollout engines: requests, completions and the sampled model, and the largest batches of workers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from nemo_opd.config.rollout import HFRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.config.sampling_checks import longest_prompt
from nemo_opd.config.teacher import CrossTokenizerTeacher, Teacher
from nemo_opd.data.row_types import FinishReason
from nemo_opd.errors import RolloutError

if TYPE_CHECKING:
    from nemo_opd.handoff.shared_memory import FileDescriptor


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling distribution. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    needs_raw: bool = True
    """Whether raw log-probabilities are needed. If not, as in evaluation, an engine may repeat the behaviour's."""

    @property
    def is_warped(self) -> bool:
        """Whether the sampling distribution differs from the model's."""
        return self.temperature != 1 or self.top_p < 1 or self.top_k is not None


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue once."""

    prompt_ids: NDArray[np.int32]
    """[P], P ≥ 1."""
    max_new_tokens: int
    seed: int
    """Seed of all randomness, independent of batching; 0 ≤ seed < 2^63."""
    stop: tuple[str, ...] = ()
    """Non-empty stop texts. The token that completes one is the sequence's last."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled continuation of a request's prompt."""

    ids: NDArray[np.int32]
    """[R]: sampled tokens, including the one that ended the turn, such as EOS."""
    logprobs: NDArray[np.float32]
    """[R]: log-probability of each token under the model, at temperature 1 and before top-p and top-k."""
    behaviour_logprobs: NDArray[np.float32]
    """[R]: log-probability of each token under the sampling policy, after temperature, top-k and top-p as the engine
    applies them; equal to `logprobs` if sampling is not warped.
    """
    finish_reason: FinishReason
    version: int
    """Version of the weights."""


@dataclass(frozen=True, slots=True)
class BatchLimit:
    """Limits of one sampling batch on a rank."""

    sequences: int
    tokens: int | None = None
    """Tokens of all prompts and continuations, including padding, or None for no limit. One sequence may exceed it."""


class Generator(Protocol):
    """A source of completions."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Return one completion per request, in order. Raises RolloutError if the engine fails for good."""


class Engine(Generator, Protocol):
    """A generator with the student's weights."""

    @property
    def version(self) -> int:
        """Number of optimizer steps that its weights have had."""

    @property
    def retried(self) -> int:
        """Number of requests sent again since the start of the run."""

    def follow(self, version: int) -> None:
        """Switch to the student's current weights, which have had `version` optimizer steps."""

    def rest(self) -> None:
        """Release memory until the next call."""


class StudentModel(Protocol):
    """The student model, held by its workers."""

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Completion]:
        """Sample in the workers with the current weights."""

    def export(self, folder: Path, dtype: str) -> None:
        """Write the current weights as a Hugging Face folder, atomically."""

    def held_weights(self, dtype: str) -> AbstractContextManager[FileDescriptor]:
        """Hold the current weights in memory, as a safetensors file, while the context is open."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Properties of the sampled model and of the devices, as an engine needs them."""

    vocab_size: int
    """Head columns that are tokens."""
    end_ids: frozenset[int]
    """Tokens that end a sequence."""
    dtype: str
    """Weight dtype in the engine; `auto` lets the engine choose."""
    workdir: Path
    """Folder for logs."""
    max_length: int | None = None
    """Longest prompt plus response in tokens. None means the model's own limit."""
    rounds_logits: bool = False
    """Whether logits are rounded to the dtype, as for the losses with handoff=logits."""
    is_training: bool = False
    """Whether a student trains on the same devices."""
    memory_share: float | None = None
    """Share of a GPU's memory that training leaves free; None if unknown."""
    sleeps: bool = False
    """Whether a server releases its GPU memory between sampling calls."""
    gpus: tuple[str, ...] = ()
    """GPUs reserved for a server, as in CUDA_VISIBLE_DEVICES. If empty, it sees the GPUs of this process."""

    @property
    def has_fp32_logits(self) -> bool:
        """Whether logits are computed in float32 although the weights are narrower."""
        return self.dtype != "float32" and not self.rounds_logits


def check_lengths(requests: Sequence[Request], limit: int | None) -> None:
    """Raise RolloutError for a request without prompt or new tokens, or one that may exceed `limit` tokens in total."""
    for request in requests:
        prompt, new = len(request.prompt_ids), request.max_new_tokens
        if not prompt or new < 1:
            raise RolloutError(
                f"a request has {prompt} prompt tokens and max_new_tokens={new}; both must be at least 1: drop empty "
                "prompts"
            )
        if limit is not None and prompt + new > limit:
            raise RolloutError(
                f"a prompt of {prompt} tokens and {new} new ones make {prompt + new}, and the model has {limit} "
                "positions; lower rollout.max_new_tokens or rollout.max_prompt_length"
            )


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
