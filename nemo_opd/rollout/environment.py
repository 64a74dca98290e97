"""Environments, which answer the student between its turns."""

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
    """Messages before the student's next turn: each with strings as `role` and `content`, none as the assistant."""
    done: bool
    """Whether there is no next turn; messages are then dropped."""
    reward: float = 0.0
    """Reward of this turn; those of all turns are added."""
    num_calls: int = 0
    """Tool calls answered."""
    num_failed_calls: int = 0
    """Tool calls that were malformed or led to an error."""


class Environment(Protocol):
    """One conversation; a new instance is made for each rollout."""

    tools: Sequence[dict[str, Any]] = ()
    """Schemas that the chat template shows to the student, in addition to those of the prompt. May be left out."""

    def reset(self, prompt: Prompt) -> list[Message]:
        """Return messages before the student's first turn, or none.

        System messages are put before the prompt's messages, others after them.
        """
        ...

    def step(self, messages: Sequence[Message]) -> EnvironmentStep:
        """Answer the student's turn, which is the last of the whole conversation's messages.

        Its content is the text as the student wrote it; `tool_calls` are the calls in it, in order, if there are any,
        as nemo_opd.rollout.tool_calls describes them. Called after every turn, also one that was cut: when turns or
        tokens have run out, the reward counts and the messages are dropped.
        """
        ...


class CheckedEnvironment:
    """The environment of one rollout, with its answers checked.

    Raises RolloutError that names the environment, the prompt's row and the turn, for whatever it raises and for
    malformed answers.
    """

    def __init__(self, make: Callable[[], Environment], index: int, timeout_s: float) -> None:
        """index: row of the prompt. timeout_s: time for each answer."""
        self._name = getattr(make, "__qualname__", type(make).__name__)
        self._index = index
        self._turn = 0
        self._timeout_s = timeout_s
        self._environment = self._call("making it", make)

    def reset(self, prompt: Prompt) -> tuple[list[Message], list[dict[str, Any]]]:
        """Return the messages and the tools that the environment adds to the prompt."""

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
            self._refuse(f"step returned {shown(step)}, no EnvironmentStep")
        self._require_messages(step.messages)
        if not isinstance(step.reward, numbers.Real) or not is_reward(step.reward):
            self._refuse(f"it paid {shown(step.reward)}; pay a finite number, ±{LARGEST_REWARD:g} at most")
        if not step.done and not step.messages:
            self._refuse("it is not done and says nothing; answer with a message, or with done=True")
        return step

    def _require_messages(self, messages: object) -> None:
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            self._refuse(f"it says {shown(messages)}, no list of messages")
        for message in messages:
            is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
            if not is_message or not isinstance(message.get("content"), str):
                self._refuse(f"it says {shown(message)}, no message with strings as `role` and `content`")
            if message["role"] == "assistant":
                self._refuse(f"it says {shown(message)} as the assistant, which is the student's role")

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
    """Constructor of the environment of one rollout."""

    make: Callable[[], Environment]
    settings: EnvironmentBase

    def __call__(self, index: int) -> CheckedEnvironment:
        """Make the environment for the prompt of a row. Raises RolloutError where that fails."""
        return CheckedEnvironment(self.make, index, self.settings.call_timeout_s)
