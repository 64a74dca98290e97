"""Environments that answer the student between its turns: their interface, their checks, and the calculator."""

from __future__ import annotations

import ast
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NoReturn, Protocol, TypeVar

from nemo_opd.config.rollout import CalculatorEnvironment, EnvironmentBase, FunctionEnvironment
from nemo_opd.config.rollout import Environment as Settings
from nemo_opd.config.settings import choices, require_lines
from nemo_opd.data.row_types import Message, Prompt
from nemo_opd.errors import ConfigError, RolloutError
from nemo_opd.rewards.numeric import last_number
from nemo_opd.rollout.conversation import function_tool
from nemo_opd.users_code import LARGEST_REWARD, UsersCodeError, called, imported, is_reward, shown

_T = TypeVar("_T")
_CALCULATOR = "calculator"
_MAX_CHARACTERS = 300
_MAX_BITS = 4096
_MAX_EXPONENT = 4096
_SYMBOLS = str.maketrans({"×": "*", "·": "*", "÷": "/", "\u2212": "-"})


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
        the form of nemo_opd.rollout.conversation. Called after every turn, also a truncated one. Once turns or tokens
        run out, the reward still counts and the messages are dropped.
        """
        ...


@dataclass(frozen=True, slots=True)
class EnvironmentFactory:
    """A factory of checked environments, one per rollout."""

    make: Callable[[], Environment]
    settings: EnvironmentBase

    def __call__(self, index: int) -> CheckedEnvironment:
        """Create the environment for the prompt in row `index`. Raises RolloutError if that fails."""
        return CheckedEnvironment(self.make, index, self.settings.call_timeout_s)


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


class Calculator:
    """An environment that answers calls of `calculator(expression)`.

    The first turn without a call ends the episode. The reward is 1 if that turn's last number equals the last number of
    the prompt's answer, else 0.
    """

    tools: Sequence[dict[str, Any]] = (
        function_tool(
            _CALCULATOR,
            "Evaluates an arithmetic expression and returns the number.",
            {"expression": "Numbers, decimals too, with + - * / ** and parentheses, such as (12 + 3.5) * 4"},
            required=["expression"],
        ),
    )

    def reset(self, prompt: Prompt) -> list[Message]:
        self._answer = prompt.answer
        return []

    def step(self, messages: Sequence[Message]) -> EnvironmentStep:
        turn = messages[-1]
        calls = turn.get("tool_calls") or ()
        if not calls:
            return EnvironmentStep((), done=True, reward=float(has_answer(turn["content"], self._answer)))
        results = [result_of(call) for call in calls]
        answers = [{"role": "tool", "name": _CALCULATOR, "content": result} for result in results]
        num_failed = sum(result.startswith("error") for result in results)
        return EnvironmentStep(answers, done=False, num_calls=len(calls), num_failed_calls=num_failed)


def has_answer(text: str, answer: str | None) -> bool:
    number, expected = last_number(text), last_number(answer or "")
    return number is not None and expected is not None and number.is_near(expected, 0)


def result_of(call: Message) -> str:
    """Return a call's result; if it fails, a text that starts with `error` and gives the reason."""
    if call["type"] == "malformed":
        return f"error: the call cannot be read: {call['error']}"
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if name != _CALCULATOR:
        return f"error: there is no tool {name!r}; call {_CALCULATOR}"
    expression = arguments.get("expression")
    if not isinstance(expression, str | int | float) or isinstance(expression, bool):
        return f"error: {_CALCULATOR} needs a string as `expression`"
    try:
        return number_text(evaluated(str(expression)))
    except ArithmeticError as error:
        return f"error: {error}"


def evaluated(expression: str) -> Fraction:
    """Return the exact value; only powers with fractional exponents are rounded, to double precision.

    Raises ArithmeticError for an expression that is not arithmetic, is undefined or is too large.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ArithmeticError(f"the expression has more than {_MAX_CHARACTERS} characters")
    try:
        return _value_of(ast.parse(expression.translate(_SYMBOLS).strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ArithmeticError("division by zero") from None
    except OverflowError:
        raise ArithmeticError("the power is too large") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ArithmeticError("the expression cannot be read as arithmetic") from None


def _value_of(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int(number)):
            return _bounded(Fraction(number))
        case ast.Constant(value=float(number)):
            return _decimal(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value_of(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value_of(operand)
        case ast.BinOp(left=first, op=op, right=second) if type(op) in _OPERATIONS:
            return _bounded(_OPERATIONS[type(op)](_value_of(first), _value_of(second)))
    raise ArithmeticError(f"{ast.unparse(node)!r} is no arithmetic; use numbers, + - * / ** and parentheses")


def _decimal(number: float) -> Fraction:
    """Return the decimal value as written, not the nearest binary number."""
    if number in (float("inf"), float("-inf")):
        raise ArithmeticError("a number is too large")
    return Fraction(repr(number))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if not base and exponent < 0:
        raise ZeroDivisionError
    if exponent.denominator == 1:
        size = max(abs(base.numerator), base.denominator).bit_length()
        if abs(exponent) > _MAX_EXPONENT or size * abs(exponent) > 2 * _MAX_BITS:
            raise OverflowError
        return Fraction(base ** int(exponent))
    if base < 0:
        raise ArithmeticError("a root of a negative number")
    return _decimal(float(base) ** float(exponent))


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: Fraction.__add__,
    ast.Sub: Fraction.__sub__,
    ast.Mult: Fraction.__mul__,
    ast.Div: Fraction.__truediv__,
    ast.Pow: _power,
}


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator).bit_length() > _MAX_BITS:
        raise ArithmeticError("the number is too large")
    return value


def number_text(value: Fraction) -> str:
    """Format an integer in full, any other number with 12 significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.12g}"
    except OverflowError:
        raise ArithmeticError("the number is too large") from None


def _users_class(settings: FunctionEnvironment) -> Callable[[], Environment]:
    """Import the class named by `package.module:Class`. Raises ConfigError if it is not an environment."""
    reference = settings.function
    imported_object = imported(reference, key="environment.function", form="package.module:Class")
    is_class = isinstance(imported_object, type)
    missing = [method for method in ("reset", "step") if not callable(getattr(imported_object, method, None))]
    if not is_class or missing:
        problem = f"without {' and '.join(missing)}" if is_class else f"a {type(imported_object).__name__}"
        raise ConfigError(
            f"environment.function={reference}: it is {problem}; name a class with the methods of "
            "nemo_opd.rollout.environment.Environment"
        )
    environment: Callable[[], Environment] = imported_object
    return environment


ENVIRONMENTS: dict[type[EnvironmentBase], Callable[[Any], Callable[[], Environment]]] = {
    CalculatorEnvironment: lambda _: Calculator,
    FunctionEnvironment: _users_class,
}
"""Settings → function that returns the environment's class."""
require_lines(choices(Settings), ENVIRONMENTS, "ENVIRONMENTS in nemo_opd/rollout/environment.py")


def build_environment(settings: Settings) -> EnvironmentFactory:
    """Build the factory of environments. Raises ConfigError for an unusable class."""
    return EnvironmentFactory(ENVIRONMENTS[type(settings)](settings), settings)
