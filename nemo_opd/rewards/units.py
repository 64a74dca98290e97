"""Units of numbers in formulas, so that 5 cm does not equal 5 m."""

import re
from collections import Counter

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

_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
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


def contradict(expected: str, answer: str) -> bool:
    """Return whether both formulas end with known units or number bases, and these differ."""
    expected_units, answer_units = _units(expected), _units(answer)
    return bool(expected_units and answer_units and not expected_units & answer_units)


def _units(formula: str) -> set[frozenset[tuple[str, int]]]:
    """Return the possible meanings of a number's unit, as sets of (unit, exponent); empty without a known unit."""
    text = _normalized(formula)
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


def _normalized(formula: str) -> str:
    """Return a formula in lower case, without text commands and the name before =, and with uniform symbols."""
    text = " ".join(_SPACE.sub(" ", _TEXT.sub(r" \1 ", formula)).lower().split()).replace(r"\mu", "µ").replace("μ", "µ")
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
