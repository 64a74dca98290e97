"""Who answers the student between its turns."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

from nemo_opd.config.environment import CalculatorEnvironment
from nemo_opd.config.environment import Environment as Settings
from nemo_opd.data.record import EnvironmentStep, Message, Prompt
from nemo_opd.errors import ConfigError, RolloutError
from nemo_opd.rollout.calculator import Calculator
from nemo_opd.users_code import LARGEST_REWARD, UsersCodeError, called, imported, is_reward, shown

T = TypeVar("T")

__all__ = ["Environment", "EnvironmentStep", "Opening", "Played", "build_environment"]


class Environment(Protocol):
    """One conversation: made anew for each rollout."""

    tools: Sequence[dict[str, Any]] = ()
    """Schemas that the chat template shows to the student, beside those of the prompt. May be left out."""

    def reset(self, prompt: Prompt) -> list[Message]:
        """Messages before the student's first turn, or none: system messages go in front of the prompt's, others
        behind them.
        """
        ...

    def step(self, messages: Sequence[Message]) -> EnvironmentStep:
        """The answer to the student's turn, which is the last of the whole conversation's messages.

        Its content is the text as the student wrote it; `tool_calls` are the calls in it, in order, where there are
        any, as nemo_opd.rollout.tool_calls describes them. Called after every turn, also one that was cut: what is
        answered when turns or tokens have run out is paid, but not said.
        """
        ...


def build_environment(settings: Settings) -> Callable[[], Environment]:
    """Makes the environment of one rollout. Raises ConfigError for a class that cannot be imported or is none."""
    return Calculator if isinstance(settings, CalculatorEnvironment) else environment_class(settings.function)


def environment_class(reference: str) -> Callable[[], Environment]:
    """The class that `package.module:Class` names. Raises ConfigError for what is none."""
    found = imported(reference, key="environment.function", form="package.module:Class")
    missing = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or missing:
        what = f"a {type(found).__name__}" if not isinstance(found, type) else f"without {' and '.join(missing)}"
        raise ConfigError(
            f"environment.function={reference}: it is {what}; name a class with the methods of "
            "nemo_opd.rollout.environment.Environment"
        )
    made: Callable[[], Environment] = found
    return made


@dataclass(frozen=True, slots=True)
class Opening:
    messages: list[Message]
    tools: list[dict[str, Any]]


class Played:
    """The environment of one rollout, whose answers are checked.

    Raises RolloutError that names the environment, the prompt's row and the turn, for what it raises and for answers
    that are none.
    """

    def __init__(self, make: Callable[[], Environment], index: int, timeout_s: float) -> None:
        """timeout_s: for each of its answers."""
        self._name = getattr(make, "__qualname__", type(make).__name__)
        self._index = index
        self._turn = 0
        self._timeout_s = timeout_s
        self._environment = self._called("making it", make)

    def reset(self, prompt: Prompt) -> Opening:
        messages, tools = self._called("reset", self._reset, prompt)
        self._require_messages(messages)
        return Opening([dict(message) for message in messages], tools)

    def _reset(self, prompt: Prompt) -> tuple[list[Message], list[dict[str, Any]]]:
        messages = self._environment.reset(prompt)
        return messages, list(getattr(self._environment, "tools", None) or ())

    def step(self, messages: Sequence[Message]) -> EnvironmentStep:
        self._turn += 1
        step = self._called("step", self._environment.step, messages)
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

    def _called(self, call: str, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return called(function, *arguments, timeout_s=self._timeout_s, key="environment.call_timeout_s")
        except UsersCodeError as error:
            self._refuse(f"{call} {error}", error)

    def _refuse(self, reason: str, cause: Exception | None = None) -> NoReturn:
        where = f"turn {self._turn}" if self._turn else "before the first turn"
        raise RolloutError(f"environment {self._name}, prompt {self._index}, {where}: {reason}") from cause
