"""Notations that algebra does not read: degrees, percent, sets of one element, words for no solution."""

import re
from collections.abc import Iterator

EMPTY_SET = r"\emptyset"
_NO_SOLUTION = re.compile(
    r"(?:x=|x\\in)?(?:\\emptyset|∅|\\\{\\\}|(?:the)?emptyset|none"
    r"|(?:therea?(?:is|re)|ithas|(?:theequation|thesystem|it)has)?no(?:real|valid|possible|such)?solutions?(?:exists?)?)"
)
"""Phrases for no solution, in lower case without spaces."""
UNDEFINED = "undefined"
_UNDEFINED = re.compile(
    r"(?:(?:it|thelimit|thevalue|theexpression)?(?:is)?(?:undefined|notdefined)"
    r"|(?:it|thelimit|thevalue)?(?:doesnotexist|doesn['’]texist)|d\.?n\.?e\.?)"
)
"""Phrases for a value that does not exist, in lower case without spaces."""
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"
_DEGREES = re.compile(_NUMBER + r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°|(?:\\text\s*\{)?\s*degrees?\b\s*\}?)")
_RADIANS = re.compile(r"(?:\\(?:text|mathrm)\s*\{)?\s*\brad(?:ian)?s?\b\s*\}?")
_PER_CENT = re.compile(r"\s*(?:\\,)?\s*(?:%|(?:\\text\s*\{)?\s*per\s?cent\s*\}?)$")
_SIZES = re.compile(r"\\(?:left|right|big|Big|bigg|Bigg)[lr]?(?![A-Za-z])\s*")
_NAME = re.compile(r"^(?:\(?\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\)?)\s*(?:=|\\in)\s*")
_CLOSING = {r"\{": (r"\}",), "(": (")", "]"), "[": (")", "]")}
_TOKEN = re.compile(r"\\?.", re.DOTALL)


def says_no_solution(text: str) -> bool:
    """Return whether a text (lower case, no spaces, no text commands) is a phrase for no solution."""
    return _NO_SOLUTION.fullmatch(text.rstrip(".")) is not None


def says_undefined(text: str) -> bool:
    """Return whether a text (lower case, no spaces, no text commands) is a phrase for a non-existent value."""
    return _UNDEFINED.fullmatch(text.rstrip(".")) is not None


def same_kind(expected: str, answer: str) -> bool:
    """Return whether the formulas are compatible: not a set of several elements and a tuple or interval.

    A list without brackets is compatible with both.
    """
    kinds = {_opening(formula) for formula in (expected, answer) if len(_elements(formula)) > 1}
    return not (r"\{" in kinds and kinds & {"(", "["})


def readings(expected: str, answer: str) -> Iterator[tuple[str, str]]:
    """Yield pairs to compare: the two formulas, then alternative readings of both.

    50 % is 50 and 1/2, 30 degrees are 30 and pi/6, and the set of one point is that point.
    """
    formulas = [expected, answer]
    if not (_are_degrees_and_radians(expected, answer) or _are_degrees_and_radians(answer, expected)):
        yield expected, answer
    numbers = [_PER_CENT.sub("", formula) for formula in formulas]
    if numbers != formulas:
        yield numbers[0], numbers[1]
        if expected not in numbers and answer not in numbers:
            return
        hundredths = [
            formula if formula == number else rf"\frac{{{number}}}{{100}}"
            for formula, number in zip(formulas, numbers, strict=True)
        ]
        yield hundredths[0], hundredths[1]
    radians = [_RADIANS.sub("", _DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", formula)) for formula in formulas]
    if radians != formulas:
        yield radians[0], radians[1]
    points = [_only_element(formula) for formula in formulas]
    if points != formulas:
        yield points[0], points[1]


def _are_degrees_and_radians(degrees: str, radians: str) -> bool:
    return _DEGREES.search(degrees) is not None and _RADIANS.search(radians) is not None


def _only_element(formula: str) -> str:
    """Return the tuple in a set of one tuple; any other formula unchanged."""
    elements = _elements(formula)
    is_point = _opening(formula) == r"\{" and len(elements) == 1 and len(_elements(elements[0])) > 1
    return elements[0] if is_point else formula


def _opening(formula: str) -> str:
    """Return the opening bracket around the entire formula; empty without brackets."""
    text = _without_name(formula)
    return next((opening for opening in _CLOSING if text.startswith(opening) and text.endswith(_CLOSING[opening])), "")


def _without_name(formula: str) -> str:
    """Return the value of `x = …` or `x in …`, without commands for bracket sizes."""
    return _NAME.sub("", _SIZES.sub("", formula)).strip()


def _elements(formula: str) -> list[str]:
    """Return the comma-separated elements inside the formula's outer brackets; empty without brackets."""
    opening = _opening(formula)
    elements, depth = [""], 0
    for token in _TOKEN.findall(_without_name(formula)[len(opening) : -len(opening)]) if opening else ():
        depth += (token[-1] in "([{") - (token[-1] in ")]}")
        if depth < 0:  # (1,2),(3,4)
            return []
        if token == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += token
    return [element.strip() for element in elements] if opening else []
