"""A prompt, and what the student made of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Message = dict[str, Any]
FinishReason = Literal["stop", "length"]
"""stop: the model ended its turn, with a token that is among the sampled ones; length: it was cut."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row of the prompts' dataset."""

    index: int
    """Of the row; rollouts of one prompt share it."""
    content: str | Sequence[Message]
    """A text to be continued, or the messages before the assistant's turn."""
    tools: Sequence[dict[str, Any]] | None = None
    answer: str | None = None
    """What a verifiable reward compares with."""
    response: str | None = None
    """What the dataset itself has as the continuation, where it has one."""


@dataclass(frozen=True, slots=True)
class EnvironmentStep:
    """What an environment answers to a turn of the student."""

    messages: Sequence[Message]
    """Said to the student before its next turn: each with strings as `role` and `content`, none as the assistant."""
    done: bool
    """There is no next turn; messages are then not said."""
    reward: float = 0.0
    """Paid for this turn; those of all turns are added."""
    num_calls: int = 0
    """Tool calls answered."""
    num_failed_calls: int = 0
    """Those of them that were malformed or led to an error."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled sequence: the prompt's tokens, the student's, and those of its environment (METHODS §10)."""

    prompt: Prompt
    """With the messages and the tools that the environment added before the first turn."""
    sample: int
    """Which of the prompt's rollouts."""
    ids: NDArray[np.int32]
    """[S], prompt included."""
    loss_mask: NDArray[np.bool_]
    """[S]: the student sampled it, its end-of-turn tokens included."""
    logprobs: NDArray[np.float32]
    """[S]: of the sampled tokens by the engine, at temperature 1 and before top-p or top-k; 0 elsewhere."""
    behaviour_logprobs: NDArray[np.float32]
    """[S]: of the sampled tokens by the policy that sampled them, after temperature, top-k and top-p; 0 elsewhere."""
    turns: NDArray[np.int32]
    """[M, 2]: tokens the student sampled in each of its turns, [start, stop)."""
    responses: tuple[str, ...]
    """Text of each turn, without special tokens."""
    messages: tuple[Message, ...]
    """The whole conversation as it went, through the student's last turn; empty where the prompt is a text. What the
    student said has the text of its turn as content, calls included, and no `tool_calls`.
    """
    finish_reason: FinishReason
    """Of the last turn. All turns before it ended with `stop`."""
    version: int
    """Of the weights that sampled the last turn; −1 where the dataset has written it."""
    env_reward: float | None = None
    """What the environment paid in all turns together; None without an environment."""
    env_done: bool | None = None
    """The environment ended the rollout; False where turns or tokens ran out; None without an environment."""
    num_calls: int = 0
    """Tool calls that the environment answered."""
    num_failed_calls: int = 0
    """Those of them that were malformed or led to an error."""
    num_cut_responses: int = 0
    """Messages of the environment that were too long."""

    @property
    def num_sampled(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def turn_messages(self) -> list[int]:
        """Which of the messages is each turn: the last M of the assistant, for environments do not speak as it."""
        spoken = [k for k, message in enumerate(self.messages) if message["role"] == "assistant"]
        return spoken[len(spoken) - len(self.turns) :]
