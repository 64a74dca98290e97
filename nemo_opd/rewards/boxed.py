"""The last \\boxed{…} of a text."""

import re

BOX = re.compile(r"\\f?boxed\s*(?:\{|(?P<one>[0-9A-Za-z]))")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """What is in the last box whose braces are balanced, without outer white space; None where no box is closed.

    \\boxed 5 is a box too. Of a box within a box the outer one counts.
    """
    content, end = None, 0
    closing = closing_braces(text)
    for box in BOX.finditer(text):
        if box.start() < end:
            continue
        if box["one"] is not None:
            content, end = box["one"], box.end()
        elif box.end() - 1 in closing:
            end = closing[box.end() - 1]
            content = text[box.end() : end].strip()
    return content


def closing_braces(text: str) -> dict[int, int]:
    """Where each brace that is closed is closed; escaped braces are characters like others."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for found in BRACE.finditer(text):
        if found[0] == "{":
            opened.append(found.start())
        elif found[0] == "}" and opened:
            closing[opened.pop()] = found.start()
    return closing
