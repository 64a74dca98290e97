"""Catches misread numbers: separators, signs, fractions, percent, powers, and digits that belong to a unit or name."""

import time
from fractions import Fraction

import pytest

from nemo_opd.rewards.numeric import WrittenNumber, last_number

CASES = {
    # signs
    "x = -5": "-5",
    "3-5": "5",
    "(a)-5": "5",
    "a = −7.5": "-7.5",
    "-$5": "-5",
    "$-5": "-5",
    "8 - 5 = 3": "3",
    # separators
    "$1,234.50": "1234.5",
    "1,234,567.89 dollars": "1234567.89",
    "1{,}000": "1000",
    r"12\,500": "12500",
    "3\u202f000": "3000",
    "1,2,3": "3",
    "1,2345": "2345",
    "[100 200 300]": "300",
    # decimals, powers
    "is 5.": "5",
    "about .25": "0.25",
    "1.5e-3": "0.0015",
    r"2 \times 10^{3} m": "2000",
    "2×10^-3": "0.002",
    # fractions
    r"\frac{3}{4}": "3/4",
    r"\frac{-3}{4}": "-3/4",
    r"-\dfrac12": "-1/2",
    r"1\frac{1}{2}": "3/2",
    "1 3/4 cups": "7/4",
    "3 / 4": "3/4",
    "on 12/25/2024": "2024",
    # digits of a unit or a name
    "5 m^2": "5",
    "12 cm^{2}": "12",
    "5 of H2O": "5",
    "y = 4x_1": "4",
    # prose
    "First 3, then **42**!": "42",
    "答案是42。": "42",
    r"\cdot3": "3",
    r"\boxed{17}": "17",
    "10:30": "30",
}


@pytest.mark.parametrize(("text", "number"), CASES.items())
def test_the_last_number_is_read_as_a_person_reads_it(text: str, number: str) -> None:
    assert last_number(text) == WrittenNumber(Fraction(number))


@pytest.mark.parametrize("text", ["", "none", "x_1", "3/0", "9" * 500, "1e999999999", "\\frac{1}{0}"])
def test_a_text_without_a_number_has_none(text: str) -> None:
    assert last_number(text) is None


@pytest.mark.parametrize("text", ["50%", r"50\%", "50 %", "50 percent"])
def test_50_percent_is_a_half_and_fifty(text: str) -> None:
    number = last_number(text)

    assert number == WrittenNumber(Fraction(50), is_percent=True)
    assert number.is_near(WrittenNumber(Fraction(50)), 0)
    assert number.is_near(WrittenNumber(Fraction(1, 2)), 0)
    assert WrittenNumber(Fraction(1, 2)).is_near(number, 0)
    assert not number.is_near(WrittenNumber(Fraction(1, 2), is_percent=True), 1e-6)


def test_the_tolerance_is_relative_to_the_answer_and_exact() -> None:
    answer = WrittenNumber(Fraction(1000))

    assert WrittenNumber(Fraction(1001)).is_near(answer, 0.001)
    assert not WrittenNumber(Fraction("1001.001")).is_near(answer, 0.001)
    assert not WrittenNumber(Fraction(2**60 + 1)).is_near(WrittenNumber(Fraction(2**60)), 0)  # equal as float64


@pytest.mark.parametrize("part", ["9", "1,", "1,000", "1 ", r"\frac{1}", "1/", "$", "-"])
def test_a_runaway_response_takes_linear_time(part: str) -> None:
    start = time.process_time()
    last_number(part * 40_000)

    assert time.process_time() - start < 2  # linear: 0.1 s; quadratic: minutes
