"""Prompts and rollouts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Message = dict[str, Any]
FinishReason = Literal["stop", "length"]
"""Reason for the end of a turn. stop: the model ended it, with one of the sampled tokens; length: it was cut."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row of the prompts' dataset."""

    index: int
    """Number of the row; rollouts of one prompt share it."""
    content: str | Sequence[Message]
    """A text to be continued, or the messages before the assistant's turn."""
    tools: Sequence[dict[str, Any]] | None = None
    answer: str | None = None
    """Answer that a verifiable reward compares with."""
    response: str | None = None
    """The dataset's own continuation, if it has one."""
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Values of the row that teachers' contexts may read, by our names of their columns."""
    row: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Values of the row by the user's names of their columns: all of them for a reward that may read any, else those
    that settings name.
    """


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled sequence: tokens of the prompt, of the student and of its environment (methods.md §10.1)."""

    prompt: Prompt
    """Prompt with the messages and the tools that the environment added before the first turn."""
    sample: int
    """Number among the prompt's rollouts."""
    ids: NDArray[np.int32]
    """[S], prompt included."""
    loss_mask: NDArray[np.bool_]
    """[S]: True where the student sampled the token, its end-of-turn tokens included."""
    logprobs: NDArray[np.float32]
    """[S]: log-probabilities by the engine, at temperature 1 and before top-p or top-k; 0 where nothing was sampled."""
    behaviour_logprobs: NDArray[np.float32]
    """[S]: log-probabilities by the policy that sampled, after temperature, top-k and top-p; 0 elsewhere."""
    turns: NDArray[np.int32]
    """[M, 2]: tokens the student sampled in each of its turns, [start, stop)."""
    responses: tuple[str, ...]
    """Text of each turn, without special tokens."""
    messages: tuple[Message, ...]
    """The whole conversation through the student's last turn; empty where the prompt is a text. The student's messages
    have the text of the turn as content, calls included, and no `tool_calls`.
    """
    finish_reason: FinishReason
    """Reason for the end of the last turn. All turns before it ended with `stop`."""
    version: int
    """Version of the weights that sampled the last turn; −1 for a continuation of the dataset."""
    env_reward: float | None = None
    """Sum of the environment's rewards of all turns; None without an environment."""
    env_done: bool | None = None
    """Whether the environment ended the rollout; False where turns or tokens ran out; None without an environment."""
    num_calls: int = 0
    """Tool calls that the environment answered."""
    num_failed_calls: int = 0
    """Tool calls that were malformed or led to an error."""
    num_cut_responses: int = 0
    """Messages of the environment that were cut."""
    before: str = ""
    """Beginning of the dataset's continuation of a text that stands in the prompt's last token, before the turn."""

    @property
    def num_sampled(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def turn_messages(self) -> list[int]:
        """Position of each turn in `messages`: the last M of the assistant, since environments have other roles."""
        by_assistant = [k for k, message in enumerate(self.messages) if message["role"] == "assistant"]
        return by_assistant[len(by_assistant) - len(self.turns) :]


def written(answer: object) -> str | None:
    """Write an answer as text: 72.0 as 72, and a list, such as MBPP's `test_list`, as JSON."""
    if answer is None:
        return None
    if isinstance(answer, Sequence) and not isinstance(answer, str):
        return json.dumps(list(answer), ensure_ascii=False)
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)
