"""Interfaces of rollout engines: requests, completions, and the model that is sampled."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nemo_opd.data.record import FinishReason
from nemo_opd.errors import RolloutError
from nemo_opd.handoff.shared_memory import FileDescriptor


@dataclass(frozen=True, slots=True)
class Sampling:
    """Distribution that tokens are drawn from. Temperature 0 takes the likeliest."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    needs_raw: bool = True
    """Whether raw log-probabilities are needed; where not, as in evaluation, an engine may return the behaviour's."""

    @property
    def is_warped(self) -> bool:
        """Whether the distribution is another than the model's own."""
        return self.temperature != 1 or self.top_p < 1 or self.top_k is not None


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue once."""

    prompt_ids: NDArray[np.int32]
    """[P], at least one."""
    max_new_tokens: int
    seed: int
    """Source of all randomness, whatever the request is batched with; 0 ≤ seed < 2^63."""
    stop: tuple[str, ...] = ()
    """Texts, none empty, of which each ends the sequence; the token that completes it is the last."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled continuation of a request's prompt."""

    ids: NDArray[np.int32]
    """[R]: the sampled tokens; the one that ended the turn, such as EOS, is the last of them."""
    logprobs: NDArray[np.float32]
    """[R]: log-probability of each by the model that sampled it, at temperature 1 and before top-p or top-k."""
    behaviour_logprobs: NDArray[np.float32]
    """[R]: log-probability of each by the policy that sampled it, after temperature, top-k and top-p, as the engine
    applies them; equal to `logprobs` where sampling is not warped.
    """
    finish_reason: FinishReason
    version: int
    """Version of the weights."""


@dataclass(frozen=True, slots=True)
class BatchLimit:
    """Limits of what a rank samples at a time."""

    sequences: int
    tokens: int | None = None
    """Tokens of all prompts and continuations, with padding, unless one sequence alone has more; None: any number."""


class Generator(Protocol):
    """A source of completions."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Return one completion for each request, in order. Raises RolloutError where the engine fails for good."""
        ...


class Engine(Generator, Protocol):
    """A generator with the student's weights."""

    @property
    def version(self) -> int:
        """Number of optimizer steps that its weights have seen."""
        ...

    @property
    def retried(self) -> int:
        """Number of requests that were sent again, since the start of the run."""
        ...

    def follow(self, version: int) -> None:
        """Sample from now on with the student's present weights, which have seen `version` optimizer steps."""
        ...

    def rest(self) -> None:
        """Give back what others need until the next call: nothing is sampled soon."""
        ...


class StudentModel(Protocol):
    """The student in its workers."""

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Completion]:
        """Sample in the workers, with the present weights."""
        ...

    def export(self, folder: Path, dtype: str) -> None:
        """Write the present weights as a Hugging Face folder, whole or not at all."""
        ...

    def held_weights(self, dtype: str) -> AbstractContextManager[FileDescriptor]:
        """Hold the present weights in memory, as a safetensors file, inside the context."""
        ...


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Facts about the model that an engine samples with, and about where it runs."""

    vocab_size: int
    """Columns of the head that are tokens."""
    end_ids: frozenset[int]
    """Tokens of which each ends a sequence."""
    dtype: str
    """Name of the weights' dtype in the engine; `auto` leaves it to the engine."""
    workdir: Path
    """Folder for logs."""
    max_length: int | None = None
    """Largest number of tokens of prompt and response together; by default the model's own limit."""
    rounds_logits: bool = False
    """Whether logits are rounded to the dtype, as the losses' logits are with handoff=logits."""
    is_training: bool = False
    """Whether a student is trained on the same devices."""
    memory_share: float | None = None
    """Share of a GPU's memory that the training leaves; None where that is unknown."""
    sleeps: bool = False
    """Whether a server gives its GPU memory back between samplings."""
    gpus: tuple[str, ...] = ()
    """GPUs that a server has for itself, as in CUDA_VISIBLE_DEVICES; none: it has the process's."""

    @property
    def has_fp32_logits(self) -> bool:
        """Whether a narrower dtype's logits are computed in float32."""
        return self.dtype != "float32" and not self.rounds_logits


def check_lengths(requests: Sequence[Request], limit: int | None) -> None:
    """Raise RolloutError for a request without a prompt, or one that may become longer than `limit` tokens."""
    for request in requests:
        prompt, new = len(request.prompt_ids), request.max_new_tokens
        if not prompt or new < 1:
            raise RolloutError(
                f"a request has {prompt} prompt tokens and max_new_tokens={new}; both must be 1 at least: drop empty "
                "prompts"
            )
        if limit is not None and prompt + new > limit:
            raise RolloutError(
                f"a prompt of {prompt} tokens and {new} new ones make {prompt + new}, and the model has {limit} "
                "positions; lower rollout.max_new_tokens or rollout.max_prompt_length"
            )
