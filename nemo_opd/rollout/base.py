"""Interfaces of rollout engines: requests, completions and the sampled model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from nemo_opd.data.record import FinishReason
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
        ...


class Engine(Generator, Protocol):
    """A generator with the student's weights."""

    @property
    def version(self) -> int:
        """Number of optimizer steps that its weights have had."""
        ...

    @property
    def retried(self) -> int:
        """Number of requests sent again since the start of the run."""
        ...

    def follow(self, version: int) -> None:
        """Switch to the student's current weights, which have had `version` optimizer steps."""
        ...

    def rest(self) -> None:
        """Release memory until the next call."""
        ...


class StudentModel(Protocol):
    """The student model, held by its workers."""

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Completion]:
        """Sample in the workers with the current weights."""
        ...

    def export(self, folder: Path, dtype: str) -> None:
        """Write the current weights as a Hugging Face folder, atomically."""
        ...

    def held_weights(self, dtype: str) -> AbstractContextManager[FileDescriptor]:
        """Hold the current weights in memory, as a safetensors file, while the context is open."""
        ...


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
