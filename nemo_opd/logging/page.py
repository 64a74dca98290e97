"""HTML pages and model cards made from the folder `templates`."""

import base64
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from nemo_opd.logging.formats import amount, change, difference, score, score_texts

MAX_OPEN = 480
"""Characters of a text that is shown whole; of a longer one its start and its end are, where an answer usually is."""
_MAX_OPEN_LINES = 12


def render(template: str, **context: Any) -> bytes:
    """Return the page of a template. All HTML pages need a title and a folder; in them texts are escaped."""
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
    """Return a text as a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def _ends(text: str) -> tuple[str, str]:
    """Return the start and the end that are shown of a text; the end is empty where the text is shown whole."""
    lines = text.split("\n")
    if len(text) <= MAX_OPEN and len(lines) <= _MAX_OPEN_LINES:
        return text, ""
    half, few = MAX_OPEN // 2, _MAX_OPEN_LINES // 2
    return "\n".join(lines[:few])[:half].rstrip(), "\n".join(lines[-few:])[-half:].lstrip()
