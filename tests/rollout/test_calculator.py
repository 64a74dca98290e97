"""The calculator's arithmetic against Python's, its limits, and the environment's rewards."""

import re
from fractions import Fraction

import hypothesis
import pytest
from hypothesis import strategies as st

from nemo_opd.data.row_types import Prompt
from nemo_opd.rollout.environment import Calculator, evaluated, has_answer, number_text, result_of

NUMBERS = st.one_of(st.integers(0, 999).map(str), st.decimals(0, 99, places=2).map(str))
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda e: f"-{e}"),
    ),
    max_leaves=6,
)


@hypothesis.given(EXPRESSIONS)
def test_values_are_exact(expression: str) -> None:
    """Compare with Python's evaluator, with fractions in place of literals."""
    exact = re.sub(r"\d+(?:\.\d+)?", lambda match: f"Fraction('{match[0]}')", expression)
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ArithmeticError, match="division by zero"):
            evaluated(expression)
        return
    assert evaluated(expression) == expected


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(12 + 3.5) * 4", "62"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.333333333333"),
        ("2 ** 100", str(2**100)),
        ("2 ** -2", "0.25"),
        ("2 ** 0.5", "1.41421356237"),
        ("6 × 7 ÷ 2 − 1", "20"),
        (7, "7"),
    ],
)
def test_results(expression: object, result: str) -> None:
    assert result_of(calling(expression)) == result


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1 / (2 - 2)", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9 ** 9", "too large"),
        ("(10 ** 600) ** 0.5 * 10 ** 900 * 10 ** 900", "too large"),
        ("2 ** 3000 * 2 ** 3000", "too large"),
        ("1e999", "too large"),
        ("(-8) ** 0.5", "root of a negative"),
        ("__import__('os').system('true')", "no arithmetic"),
        ("x + 1", "no arithmetic"),
        ("True + 1", "no arithmetic"),
        ("1 if 2 else 3", "no arithmetic"),
        ("2 ^ 3", "no arithmetic"),
        ("1 +", "cannot be read"),
        ("", "cannot be read"),
        ("(" * 250 + "1", "cannot be read"),
        ("1+" * 200 + "1", "more than 300 characters"),
        (None, "needs a string"),
        (True, "needs a string"),
    ],
)
def test_failures_are_reported(expression: object, reason: str) -> None:
    result = result_of(calling(expression))
    assert result.startswith("error: ")
    assert reason in result


def test_unknown_tools_and_unreadable_calls_are_reported() -> None:
    assert "no tool 'search'" in result_of({"type": "function", "function": {"name": "search", "arguments": {}}})
    assert "no JSON" in result_of({"type": "malformed", "text": "{", "error": "no JSON"})


def test_large_integers_are_written_in_full() -> None:
    assert number_text(Fraction(10) ** 1000) == "1" + "0" * 1000
    with pytest.raises(ArithmeticError, match="too large"):
        number_text(Fraction(10**1000 + 1, 3))


@pytest.mark.parametrize(
    ("text", "answer", "is_right"),
    [
        ("So 3 + 4 is 7.", "7", True),
        ("First 7, then 8", "7", False),
        ("It is 1,234.50", "1234.5", True),
        ("-5", "#### -5", True),
        ("seven", "7", False),
        ("7", None, False),
        ("7", "seven", False),
    ],
)
def test_the_last_number_is_the_answer(text: str, answer: str | None, is_right: bool) -> None:
    assert has_answer(text, answer) == is_right


def test_a_turn_with_calls_continues_and_a_turn_without_is_rewarded() -> None:
    calculator = Calculator()
    assert calculator.reset(Prompt(0, [], answer="42")) == []
    calls = [calling("6 * 7"), calling("1 / 0")]
    step = calculator.step([{"role": "assistant", "content": "", "tool_calls": calls}])
    assert [message["content"] for message in step.messages] == ["42", "error: division by zero"]
    assert (step.done, step.reward, step.num_calls, step.num_failed_calls) == (False, 0.0, 2, 1)
    step = calculator.step([{"role": "assistant", "content": "It is 42."}])
    assert (step.done, step.reward, step.messages) == (True, 1.0, ())


def calling(expression: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
