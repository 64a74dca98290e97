"""Texts of models, servers and files on a terminal: control characters are shown, not obeyed."""

import json
import logging
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_PICTURES = 0x2400
"""Unicode's picture of the control character 0; the pictures of the next 31 follow."""
_SHOWN: dict[int, int | str] = {code: _PICTURES + code for code in range(0x20) if chr(code) not in "\n\t"}
_SHOWN |= {0x7F: 0x2421, **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}}


def visible(text: str) -> str:
    """Replace control characters, other than line feeds and tabs, by pictures such as ␛."""
    return text.translate(_SHOWN)


def visible_json(value: object) -> str:
    """Format a value as a line of JSON with its control characters escaped, and other characters as they are."""
    return json.dumps(value, ensure_ascii=False).translate({code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)})


class VisibleConsole(Console):
    """A console that shows the control characters in texts; rich itself drops a few of them and prints the escapes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


class VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))
