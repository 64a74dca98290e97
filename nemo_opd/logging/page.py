"""HTML pages and model cards, rendered from the folder `templates`."""

import base64
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from nemo_opd.logging.formats import amount, change, difference, score, score_texts

MAX_OPEN = 480
"""Length in characters up to which a text is shown in full; longer texts show their start and end, as answers usually
come last.
"""
_MAX_OPEN_LINES = 12


def render(template: str, **context: Any) -> bytes:
    """Return the page of a template. HTML pages need a title and a folder, and their texts are escaped."""
    return _environment().get_template(template).render(**context).encode()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("nemo_opd.logging"),
        autoescape=select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"amount": amount, "change": change, "data_url": _data_url, "ends": _ends, "cell": _cell}
    environment.globals |= {"score_texts": score_texts, "score_text": score, "difference_text": difference}
    return environment


def _data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _cell(text: str) -> str:
    """Format a text as a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def _ends(text: str) -> tuple[str, str]:
    """Return the start and end of a text to show; the end is empty if the text is shown in full."""
    lines = text.split("\n")
    if len(text) <= MAX_OPEN and len(lines) <= _MAX_OPEN_LINES:
        return text, ""
    half, num_lines = MAX_OPEN // 2, _MAX_OPEN_LINES // 2
    return "\n".join(lines[:num_lines])[:half].rstrip(), "\n".join(lines[-num_lines:])[-half:].lstrip()
