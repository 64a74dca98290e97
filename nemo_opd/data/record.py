"""Prompts and rollouts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Message = dict[str, Any]
FinishReason = Literal["stop", "length"]
"""Reason why a turn ended. stop: the model ended it with one of the sampled tokens; length: it was cut."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row of the prompts' dataset."""

    index: int
    """Number of the row, shared by all rollouts of the prompt."""
    content: str | Sequence[Message]
    """A text to continue, or the messages before the assistant's turn."""
    tools: Sequence[dict[str, Any]] | None = None
    answer: str | None = None
    """Answer that a verifiable reward compares with."""
    response: str | None = None
    """The dataset's own continuation, if it has one."""
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Values of the row that teachers' contexts may read, keyed by our column names."""
    row: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Values of the row keyed by the user's column names: all of them if a reward may read any column, otherwise the
    columns that settings name.
    """


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled sequence: tokens of the prompt, the student and its environment (methods.md §10.1)."""

    prompt: Prompt
    """Prompt, including messages and tools that the environment added before the first turn."""
    sample: int
    """Index among the prompt's rollouts."""
    ids: NDArray[np.int32]
    """[S], including the prompt."""
    loss_mask: NDArray[np.bool_]
    """[S]: True for tokens that the student sampled, including its end-of-turn tokens."""
    logprobs: NDArray[np.float32]
    """[S]: the engine's log-probabilities at temperature 1, before top-p or top-k; 0 for tokens that were not sampled.
    """
    behaviour_logprobs: NDArray[np.float32]
    """[S]: log-probabilities of the sampling policy, after temperature, top-k and top-p; 0 elsewhere."""
    turns: NDArray[np.int32]
    """[M, 2]: range [start, stop) of the tokens that the student sampled in each turn."""
    responses: tuple[str, ...]
    """Text of each turn, without special tokens."""
    messages: tuple[Message, ...]
    """Conversation through the student's last turn; empty if the prompt is a text. The student's messages have the
    turn's text, including calls, as content, and no `tool_calls`.
    """
    finish_reason: FinishReason
    """Reason why the last turn ended. All earlier turns ended with `stop`."""
    version: int
    """Version of the weights that sampled the last turn; −1 for a continuation from the dataset."""
    env_reward: float | None = None
    """Sum of the environment's rewards over all turns; None without an environment."""
    env_done: bool | None = None
    """Whether the environment ended the rollout; False if turns or tokens ran out, None without an environment."""
    num_calls: int = 0
    """Tool calls that the environment answered."""
    num_failed_calls: int = 0
    """Tool calls that were malformed or led to an error."""
    num_cut_responses: int = 0
    """Environment messages that were cut."""
    before: str = ""
    """Beginning of the dataset's continuation of a text, as far as it shares the prompt's last token, before the turn.
    """

    @property
    def num_sampled(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def turn_messages(self) -> list[int]:
        """Index of each turn in `messages`: the last M assistant messages, as environments use other roles."""
        by_assistant = [k for k, message in enumerate(self.messages) if message["role"] == "assistant"]
        return by_assistant[len(by_assistant) - len(self.turns) :]


def written(answer: object) -> str | None:
    """Write an answer as text: 72.0 as 72, and a list, such as MBPP's `test_list`, as JSON."""
    if answer is None:
        return None
    if isinstance(answer, Sequence) and not isinstance(answer, str):
        return json.dumps(list(answer), ensure_ascii=False)
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)
