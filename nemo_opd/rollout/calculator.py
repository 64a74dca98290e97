"""Calculator environment: one tool, which evaluates arithmetic."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from nemo_opd.data.record import Message, Prompt
from nemo_opd.rewards.numeric import last_number
from nemo_opd.rollout.environment import EnvironmentStep
from nemo_opd.rollout.tool_calls import function_tool

_NAME = "calculator"
_MAX_CHARACTERS = 300
_MAX_BITS = 4096
_MAX_EXPONENT = 4096

_SYMBOLS = str.maketrans({"×": "*", "·": "*", "÷": "/", "\u2212": "-"})


class Calculator:
    """An environment that answers calls of `calculator(expression)`.

    The first turn without a call ends the episode. The reward is 1 if that turn's last number equals the last number of
    the prompt's answer, else 0.
    """

    tools: Sequence[dict[str, Any]] = (
        function_tool(
            _NAME,
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
        answers = [{"role": "tool", "name": _NAME, "content": result} for result in results]
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
    if name != _NAME:
        return f"error: there is no tool {name!r}; call {_NAME}"
    expression = arguments.get("expression")
    if not isinstance(expression, str | int | float) or isinstance(expression, bool):
        return f"error: {_NAME} needs a string as `expression`"
    try:
        return written(evaluated(str(expression)))
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


def written(value: Fraction) -> str:
    """Format an integer in full, any other number with 12 significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.12g}"
    except OverflowError:
        raise ArithmeticError("the number is too large") from None
