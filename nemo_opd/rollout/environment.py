"""Environments that answer the student between its turns."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

from nemo_opd.config.environment import EnvironmentBase
from nemo_opd.data.record import Message, Prompt
from nemo_opd.errors import RolloutError
from nemo_opd.users_code import LARGEST_REWARD, UsersCodeError, called, is_reward, shown

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class EnvironmentStep:
    """An environment's answer to a turn of the student."""

    messages: Sequence[Message]
    """Messages before the student's next turn. `role` and `content` are strings, and no message is the assistant's."""
    done: bool
    """Whether the episode ends. If so, the messages are dropped."""
    reward: float = 0.0
    """Reward of this turn. Rewards are summed over turns."""
    num_calls: int = 0
    """Tool calls answered."""
    num_failed_calls: int = 0
    """Tool calls that were malformed or failed."""


class Environment(Protocol):
    """One conversation. Each rollout gets a new instance."""

    tools: Sequence[dict[str, Any]] = ()
    """Optional tool schemas for the chat template, in addition to the prompt's."""

    def reset(self, prompt: Prompt) -> list[Message]:
        """Return messages to add before the student's first turn, if any.

        System messages go before the prompt's messages, all other messages after them.
        """
        ...

    def step(self, messages: Sequence[Message]) -> EnvironmentStep:
        """Answer the student's turn, the last of `messages`, which hold the whole conversation.

        The turn's `content` is its text as sampled; `tool_calls`, if present, holds the calls in it, in order and in
        the form of nemo_opd.rollout.tool_calls. Called after every turn, also a truncated one. Once turns or tokens run
        out, the reward still counts and the messages are dropped.
        """
        ...


class CheckedEnvironment:
    """The environment of one rollout, with checks of its answers.

    Exceptions and malformed answers raise a RolloutError that names the environment, the prompt's row and the turn.
    """

    def __init__(self, make: Callable[[], Environment], index: int, timeout_s: float) -> None:
        """index: row of the prompt. timeout_s: limit per call."""
        self._name = getattr(make, "__qualname__", type(make).__name__)
        self._index = index
        self._turn = 0
        self._timeout_s = timeout_s
        self._environment = self._call("making it", make)

    def reset(self, prompt: Prompt) -> tuple[list[Message], list[dict[str, Any]]]:
        """Return the messages and tools that the environment adds to the prompt."""

        def opening() -> tuple[list[Message], list[dict[str, Any]]]:
            messages = self._environment.reset(prompt)
            return messages, list(getattr(self._environment, "tools", None) or ())

        messages, tools = self._call("reset", opening)
        self._require_messages(messages)
        return [dict(message) for message in messages], tools

    def step(self, messages: Sequence[Message]) -> EnvironmentStep:
        self._turn += 1
        step = self._call("step", self._environment.step, messages)
        if not isinstance(step, EnvironmentStep):
            self._refuse(f"step returned {shown(step)}; return an EnvironmentStep")
        self._require_messages(step.messages)
        if not isinstance(step.reward, numbers.Real) or not is_reward(step.reward):
            self._refuse(f"its reward is {shown(step.reward)}; return a finite number within ±{LARGEST_REWARD:g}")
        if not step.done and not step.messages:
            self._refuse("it returned no messages although it is not done; return a message or done=True")
        return step

    def _require_messages(self, messages: object) -> None:
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            self._refuse(f"it returned {shown(messages)} as messages; return a list")
        for message in messages:
            is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
            if not is_message or not isinstance(message.get("content"), str):
                self._refuse(f"it returned the message {shown(message)}; `role` and `content` must be strings")
            if message["role"] == "assistant":
                self._refuse(f"it returned the message {shown(message)} as the assistant, which is the student's role")

    def _call(self, name: str, function: Callable[..., _T], *arguments: Any) -> _T:
        try:
            return called(function, *arguments, timeout_s=self._timeout_s, key="environment.call_timeout_s")
        except UsersCodeError as error:
            self._refuse(f"{name} {error}", error)

    def _refuse(self, reason: str, cause: Exception | None = None) -> NoReturn:
        where = f"turn {self._turn}" if self._turn else "before the first turn"
        raise RolloutError(f"environment {self._name}, prompt {self._index}, {where}: {reason}") from cause


@dataclass(frozen=True, slots=True)
class EnvironmentFactory:
    """A factory of checked environments, one per rollout."""

    make: Callable[[], Environment]
    settings: EnvironmentBase

    def __call__(self, index: int) -> CheckedEnvironment:
        """Create the environment for the prompt in row `index`. Raises RolloutError if that fails."""
        return CheckedEnvironment(self.make, index, self.settings.call_timeout_s)
