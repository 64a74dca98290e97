"""What a rollout engine is asked for, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nemo_opd.data.record import FinishReason


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Temperature 0 takes the likeliest."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    needs_raw: bool = True
    """Raw log-probabilities are needed; where not, as in evaluation, an engine may give the behaviour's for them."""

    @property
    def is_warped(self) -> bool:
        """Whether tokens are drawn from another distribution than the model's own."""
        return self.temperature != 1 or self.top_p < 1 or self.top_k is not None


@dataclass(frozen=True, slots=True)
class Request:
    """One continuation of one prompt."""

    prompt_ids: NDArray[np.int32]
    """[P], at least one."""
    max_new_tokens: int
    seed: int
    """Decides all that is random about it, whatever it is batched with; 0 ≤ seed < 2^63."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled for a request."""

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
    """Of the weights."""


class Generator(Protocol):
    """Continues prompts."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion a request, in order. Raises RolloutError where the engine fails for good."""
        ...


class Engine(Generator, Protocol):
    """Samples from one version of the student's weights at a time."""

    @property
    def version(self) -> int:
        """Of the weights it samples with: the number of optimizer steps they have seen."""
        ...

    def update_weights(self, folder: Path, version: int) -> None:
        """Sample from now on with the model in a Hugging Face folder. Raises RolloutError."""
        ...

    def close(self) -> None:
        """Free what it holds; processes it started are gone afterwards."""
        ...
