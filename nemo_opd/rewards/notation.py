"""Notations of formulas that algebra does not read: degrees, per cent, sets of one element, words for no solution."""

import re
from collections.abc import Iterator

EMPTY_SET = r"\emptyset"
_NO_SOLUTION = re.compile(
    r"(?:x=|x\\in)?(?:\\emptyset|∅|\\\{\\\}|(?:the)?emptyset|none"
    r"|(?:therea?(?:is|re)|ithas|(?:theequation|thesystem|it)has)?no(?:real|valid|possible|such)?solutions?(?:exists?)?)"
)
"""Words for no solution, in lower case without spaces."""
UNDEFINED = "undefined"
_UNDEFINED = re.compile(
    r"(?:(?:it|thelimit|thevalue|theexpression)?(?:is)?(?:undefined|notdefined)"
    r"|(?:it|thelimit|thevalue)?(?:doesnotexist|doesn['’]texist)|d\.?n\.?e\.?)"
)
"""Words for a value that does not exist, in lower case without spaces."""
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"
_DEGREES = re.compile(_NUMBER + r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°|(?:\\text\s*\{)?\s*degrees?\b\s*\}?)")
_RADIANS = re.compile(r"(?:\\(?:text|mathrm)\s*\{)?\s*\brad(?:ian)?s?\b\s*\}?")
_PER_CENT = re.compile(r"\s*(?:\\,)?\s*(?:%|(?:\\text\s*\{)?\s*per\s?cent\s*\}?)$")
_SIZES = re.compile(r"\\(?:left|right|big|Big|bigg|Bigg)[lr]?(?![A-Za-z])\s*")
_NAME = re.compile(r"^(?:\(?\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\)?)\s*(?:=|\\in)\s*")
_CLOSING = {r"\{": (r"\}",), "(": (")", "]"), "[": (")", "]")}
_TOKEN = re.compile(r"\\?.", re.DOTALL)


def says_no_solution(text: str) -> bool:
    """Return whether a text in lower case, without spaces and commands that set text, says that nothing solves."""
    return _NO_SOLUTION.fullmatch(text.rstrip(".")) is not None


def says_undefined(text: str) -> bool:
    """Return whether a text in lower case, without spaces and commands that set text, says that no value exists."""
    return _UNDEFINED.fullmatch(text.rstrip(".")) is not None


def same_kind(wanted: str, given: str) -> bool:
    """Return whether one formula is not a set of several elements where the other is a tuple or an interval.

    A list without brackets is of either kind.
    """
    kinds = {_opening(formula) for formula in (wanted, given) if len(_elements(formula)) > 1}
    return not (r"\{" in kinds and kinds & {"(", "["})


def readings(wanted: str, given: str) -> Iterator[tuple[str, str]]:
    """Yield the pairs that may be compared: the two formulas, and other readings of them if they are not equal.

    50 % is 50 and 1/2, 30 degrees are 30 and pi/6, the set of one point is that point.
    """
    if not (_are_degrees_and_radians(wanted, given) or _are_degrees_and_radians(given, wanted)):
        yield wanted, given
    numbers = [_PER_CENT.sub("", formula) for formula in (wanted, given)]
    if numbers != [wanted, given]:
        yield numbers[0], numbers[1]
        if wanted not in numbers and given not in numbers:
            return
        hundredths = [
            formula if formula == number else rf"\frac{{{number}}}{{100}}"
            for formula, number in zip((wanted, given), numbers, strict=True)
        ]
        yield hundredths[0], hundredths[1]
    radians = [_RADIANS.sub("", _DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", formula)) for formula in (wanted, given)]
    if radians != [wanted, given]:
        yield radians[0], radians[1]
    points = [_only_element(formula) for formula in (wanted, given)]
    if points != [wanted, given]:
        yield points[0], points[1]


def _are_degrees_and_radians(degrees: str, radians: str) -> bool:
    return _DEGREES.search(degrees) is not None and _RADIANS.search(radians) is not None


def _only_element(formula: str) -> str:
    """Return the tuple that is the only element of a set; another formula as it is."""
    elements = _elements(formula)
    is_point = _opening(formula) == r"\{" and len(elements) == 1 and len(_elements(elements[0])) > 1
    return elements[0] if is_point else formula


def _opening(formula: str) -> str:
    """Return the bracket that encloses all of a formula; nothing if none does."""
    text = _unnamed(formula)
    return next((each for each in _CLOSING if text.startswith(each) and text.endswith(_CLOSING[each])), "")


def _unnamed(formula: str) -> str:
    """Return the value of `x = …` or `x in …`, without commands for the size of brackets."""
    return _NAME.sub("", _SIZES.sub("", formula)).strip()


def _elements(formula: str) -> list[str]:
    """Return what commas separate inside the brackets that enclose a formula; nothing if none do."""
    opening = _opening(formula)
    elements, depth = [""], 0
    for token in _TOKEN.findall(_unnamed(formula)[len(opening) : -len(opening)]) if opening else ():
        depth += (token[-1] in "([{") - (token[-1] in ")]}")
        if depth < 0:  # (1,2),(3,4)
            return []
        if token == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += token
    return [element.strip() for element in elements] if opening else []
