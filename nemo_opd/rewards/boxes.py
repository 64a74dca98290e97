"""Boxed formulas of LaTeX."""

import re

_BOX = re.compile(r"\\f?boxed\s*(?:\{|(?P<one>[0-9A-Za-z]))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """Return the content of the last box whose braces are balanced, stripped; None where no box is closed.

    \\boxed 5 is a box too. Of a box within a box the outer one counts.
    """
    content, end = None, 0
    closing = _closing_braces(text)
    for box in _BOX.finditer(text):
        if box.start() < end:
            continue
        if box["one"] is not None:
            content, end = box["one"], box.end()
        elif box.end() - 1 in closing:
            end = closing[box.end() - 1]
            content = text[box.end() : end].strip()
    return content


def _closing_braces(text: str) -> dict[int, int]:
    """Return, by the position of each opening brace, that of its closing one; escaped braces do not count."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for found in _BRACE.finditer(text):
        if found[0] == "{":
            opened.append(found.start())
        elif found[0] == "}" and opened:
            closing[opened.pop()] = found.start()
    return closing
