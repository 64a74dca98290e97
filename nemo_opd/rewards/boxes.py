"""Boxed formulas in LaTeX."""

import re

_BOX = re.compile(r"\\f?boxed\s*(?:\{|(?P<one>[0-9A-Za-z]))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """Return the stripped content of the last box with balanced braces; None if no box is closed.

    \\boxed 5 is a box too. If boxes are nested, the outer one counts.
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
    """Return position of opening brace → position of closing brace, without escaped braces."""
    closing: dict[int, int] = {}
    open_braces: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            open_braces.append(brace.start())
        elif brace[0] == "}" and open_braces:
            closing[open_braces.pop()] = brace.start()
    return closing
