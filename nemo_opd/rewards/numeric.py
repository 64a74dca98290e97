"""Numbers in texts, a reward of 1 if the last number is the answer, and the units of numbers.

Numbers may have thousands separators, signs, fractions, percent signs, powers of ten and LaTeX.
A comma or a LaTeX or Unicode thin space before three digits separates thousands; a point separates decimals.
Digits in a name (`H2`), an index or an exponent (`x_1`, `m^2`) do not count as numbers.
"""

import re
from collections import Counter, deque
from dataclasses import dataclass
from fractions import Fraction

from nemo_opd.config.reward import NumericReward
from nemo_opd.data.row_types import Rollout
from nemo_opd.errors import DataError
from nemo_opd.rewards.extraction import build_extractor
from nemo_opd.rewards.reward_function import RewardFunction, last_turn

_GAP = r"(?:,|\{,\}|\\,|\\ |[\u00a0\u2009\u202f])"
_DIGITS = rf"(?:\d{{1,3}}(?:{_GAP}\d{{3}}(?!\d))++|\d++)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.\d++)?|\.\d++)"
_SIGN = r"[-+\u2212]"
_TIMES_TEN = (
    rf"(?:[eE](?P<e>{_SIGN}?\d++)|\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*\{{?\s*(?P<power>{_SIGN}?\d++)\s*\}}?)"
)
# Possessive quantifiers throughout, so that a digit repeated ten thousand times does not make the search quadratic.
_NUMBER = re.compile(
    # 3-5 and (a)-5 are differences, so 5 has no sign
    rf"(?:(?<![\w)\]}}])(?P<sign>{_SIGN}))?(?:\\?[$€£]\s*)?(?P<sign_after>(?<=[$€£]){_SIGN})?(?<![A-Za-z_^\d])(?<![_^]\{{)"
    r"(?:(?:(?P<whole>\d++)(?:\s(?=\d+/\d)|\s?(?=\\[dt]?frac)))?"
    r"(?:\\[dt]?frac\s*(?:\{\s*(?P<top_sign>[-\u2212])?(?P<top>\d++)\s*\}|(?P<top_digit>\d))\s*(?:\{\s*(?P<bottom>\d++)\s*\}|(?P<bottom_digit>\d))"
    r"|(?<!/)(?P<left>\d++)\s?/\s?(?P<right>\d++)(?!/\d))"
    rf"|(?P<plain>{_UNSIGNED}){_TIMES_TEN}?)"
    r"(?P<percent>\s?\\?%|\s?percent\b)?"
)
_COMMAND = re.compile(r"(?<!\\)(\\[A-Za-z]+)(?<!frac)(?=\d)")
_SEPARATOR = re.compile(_GAP)
_MAX_DIGITS = 400
"""Longer digit strings are not meant as numbers, and exact arithmetic with them takes too long."""
_SPELLINGS = {
    "minute": "min",
    "hour": "h hr",
    "day": "",
    "week": "wk",
    "month": "",
    "year": "yr",
    "inch": "in inches",
    "foot": "ft feet",
    "yard": "yd",
    "mile": "mi",
    "ounce": "oz",
    "pound": "lb",
    "ton": "tonne",
    "gallon": "gal",
    "quart": "qt",
    "pint": "pt",
    "cup": "",
    "dollar": "usd",
    "cent": "",
    "euro": "eur €",
    "angle": "degree deg radian rad",
    "celsius": "",
    "fahrenheit": "",
    "percent": "%",
    "am": "",
    "pm": "",
}
"""Spellings of units without metric prefixes. Degrees and radians are one unit, since they can be converted."""
_METRIC = {
    "m": ("meter", "metre"),
    "g": ("gram", "gramme"),
    "l": ("liter", "litre"),
    "s": ("second", "sec"),
}
_PREFIXES = {"k": "kilo", "d": "deci", "c": "centi", "m": "milli", "µ": "micro", "n": "nano", "": ""}
_SPEEDS = {"mph": ("mile", "hour"), "kph": ("km", "hour"), "kmh": ("km", "hour")}
_PRIMES = {"'": ("foot", "minute"), "''": ("inch", "s"), '"': ("inch", "s")}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_SPACE = re.compile(r"\\(?:[,;:! ]|quad\b|left\b|right\b)|~")
_QUOTIENT = re.compile(r"\\[dt]?frac\s*\{([a-z ]+)\}\s*\{([a-z ]+)\}")
_DEGREE = re.compile(r"\^\s*\{?\s*\\circ\b\s*\}?|\\degree\b")
_TEMPERATURE = re.compile(r"(?:°|\bdegrees?\b)\s*(?:(c|celsius)|(f|fahrenheit))\b")
_PRIME = re.compile(r"\^\s*\{?\s*\\prime\b\s*\}?")
_INDEX = re.compile(r"([\^_])\s*\{\s*(-?\d{1,9})\s*\}")
_ABBREVIATION = re.compile(r"(?<=[a-z])\.")
_NAME = re.compile(r"[a-z]\s*=\s*")
_DIGITS_IN_BASE = re.compile(r"\d+\s*_\s*(\d{1,9})")
_VALUE = re.compile(r"(?:\\[a-z]+|[^a-zµ%€'\"\\])*")
_TOKEN = re.compile(r"[a-zµ]+|\^\s*-?\d|''|\\cdot\b|\S")


@dataclass(frozen=True, slots=True)
class WrittenNumber:
    """A number in a text."""

    value: Fraction
    """Value before any percent sign: 50 for 50 %."""
    is_percent: bool = False

    def is_near(self, reference: "WrittenNumber", tolerance: float) -> bool:
        """Return whether |self − reference| ≤ tolerance · |reference|.

        If only one of them has a percent sign, 50 % is both 50 and ½.
        """
        if self.is_percent == reference.is_percent:
            return _is_near(self.value, reference.value, tolerance)
        scale = Fraction(1, 100) if self.is_percent else Fraction(100)
        return any(_is_near(value, reference.value, tolerance) for value in (self.value, self.value * scale))

    def __str__(self) -> str:
        return f"{self.value}{'%' * self.is_percent}"


def _is_near(value: Fraction, expected: Fraction, tolerance: float) -> bool:
    return abs(value - expected) <= Fraction(tolerance) * abs(expected)


class NumericMatch(RewardFunction):
    """A reward of 1 if the last number of the last turn is the answer's, within a relative tolerance, else 0."""

    votes = True

    def __init__(self, settings: NumericReward) -> None:
        super().__init__(settings)
        self._extract = build_extractor(settings.extract)
        self._tolerance = settings.tolerance

    @classmethod
    def check_answer(cls, answer: str) -> None:
        _number_of(answer)

    def score(self, rollout: Rollout) -> float:
        expected, number = _number_of(self.answer(rollout)), self._extract_number(rollout)
        return float(number is not None and number.is_near(expected, self._tolerance))

    def vote(self, rollout: Rollout) -> str | None:
        number = self._extract_number(rollout)
        return None if number is None else str(number)

    def _extract_number(self, rollout: Rollout) -> WrittenNumber | None:
        text = self._extract(last_turn(rollout))
        return None if text is None else last_number(text)


def _number_of(answer: str) -> WrittenNumber:
    """Return the answer's last number. Raises DataError if it has none."""
    number = last_number(answer)
    if number is None:
        raise DataError(f"the answer {answer!r} holds no number that reward.type=numeric could compare with")
    return number


def last_number(text: str) -> WrittenNumber | None:
    """Return the last number of a text. None without a number, or if it divides by zero or has hundreds of digits."""
    matches = deque(_NUMBER.finditer(_COMMAND.sub(r"\1 ", text)), maxlen=1)
    return _read(matches[0]) if matches else None


def _read(match: re.Match[str]) -> WrittenNumber | None:
    parts = match.groupdict()
    fraction = _fraction_of(parts)
    if fraction is None:
        return None
    sign = parts["sign"] or parts["sign_after"] or "+"
    is_negative = (sign != "+") != (parts["top_sign"] is not None)
    return WrittenNumber(-fraction if is_negative else fraction, parts["percent"] is not None)


def _fraction_of(parts: dict[str, str | None]) -> Fraction | None:
    if (plain := parts["plain"]) is not None:
        return _decimal(_SEPARATOR.sub("", plain), (parts["e"] or parts["power"] or "0").replace("\u2212", "-"))
    top = parts["top"] or parts["top_digit"] or parts["left"] or ""
    bottom = parts["bottom"] or parts["bottom_digit"] or parts["right"] or ""
    integer = parts["whole"] or "0"
    if max(len(top), len(bottom), len(integer)) > _MAX_DIGITS or not int(bottom):
        return None
    return int(integer) + Fraction(int(top), int(bottom))


def _decimal(digits: str, exponent: str) -> Fraction | None:
    if len(digits) > _MAX_DIGITS or len(exponent) > 4 or abs(int(exponent)) > _MAX_DIGITS:
        return None
    return Fraction(digits) * Fraction(10) ** int(exponent)


def units_differ(expected: str, answer: str) -> bool:
    """Return whether both formulas end with known units or number bases, and these differ."""
    expected_units, answer_units = _units(expected), _units(answer)
    return bool(expected_units and answer_units and not expected_units & answer_units)


def _units(formula: str) -> set[frozenset[tuple[str, int]]]:
    """Return the possible meanings of a number's unit, as sets of (unit, exponent); empty without a known unit."""
    text = _plain_text(formula)
    if digits := _DIGITS_IN_BASE.fullmatch(text):
        return {frozenset({(f"base {int(digits[1])}", 1)})}
    amount = text.removeprefix(r"\$")
    powers = Counter({"dollar": 1} if amount != text else {})
    value = _VALUE.match(amount)
    if value is None or not value[0].strip():
        return set()
    unit = amount[value.end() :].strip()
    if unit in _PRIMES:
        return {frozenset({(name, 1)}) for name in _PRIMES[unit]}
    sign, power, last = 1, 1, ""
    for token in _TOKEN.findall(unit):
        if token in ("/", "per"):
            sign = -1
        elif token in _POWERS:
            power = _POWERS[token]
        elif token[0] == "^" and last:
            powers[last] *= int(token[1:])
        elif token in _SPEEDS:
            powers.update(dict(zip(_SPEEDS[token], (1, -1), strict=True)))
        elif token in _UNIT_OF:
            last = _UNIT_OF[token]
            powers[last] += sign * power
            power = 1
        elif token not in ("*", r"\cdot"):
            return set()
    return {frozenset(powers.items())} if powers else set()


def _plain_text(formula: str) -> str:
    """Return a formula in lower case, without text commands and the name before =, and with uniform symbols."""
    text = (
        " ".join(_SPACE.sub(" ", TEXT_COMMAND.sub(r" \1 ", formula)).lower().split())
        .replace(r"\mu", "µ")
        .replace("μ", "µ")
    )
    text = _DEGREE.sub("°", _QUOTIENT.sub(r" \1/\2", text))
    text = _TEMPERATURE.sub(lambda match: " celsius " if match[1] else " fahrenheit ", text)
    text = _PRIME.sub("'", text).replace("°", " degree ").replace("²", "^2").replace("³", "^3").replace(r"\%", "%")
    text = _ABBREVIATION.sub("", _INDEX.sub(r"\1\2", text.replace("per cent", "percent"))).strip()
    return text[name.end() :] if (name := _NAME.match(text)) else text


def _spelled_units() -> dict[str, str]:
    """Return spelling → unit, in lower case."""
    spellings = {name: {name, *synonyms.split()} for name, synonyms in _SPELLINGS.items()}
    for symbol, names in _METRIC.items():
        for short, long in _PREFIXES.items():
            spellings[short + symbol] = {short + symbol, *(long + name for name in names)}
    unit_of = {}
    for unit, words in spellings.items():
        unit_of.update({word + "s": unit for word in words if len(word) > 1})
    for unit, words in spellings.items():  # ms is not the plural of m
        unit_of.update(dict.fromkeys(words, unit))
    return unit_of


_UNIT_OF = _spelled_units()
