"""What the pages of a run and of a sweep have in common: one file that needs no other and no network."""

import base64
from collections.abc import Iterable
from importlib.resources import files


def page(title: str, body: Iterable[str], made_from: str) -> str:
    """title: escaped."""
    style = files("nemo_opd.logging").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # without an icon of its own a page makes the browser ask the server for one
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{style}</style></head>\n'
        f"<body>{''.join(body)}<footer>Made by nemo_opd from {made_from}.</footer></body></html>\n"
    )


def chart(title: str, light: bytes, dark: bytes) -> str:
    """A section with a PNG for either theme."""
    return (
        f"<section><h2>{title}</h2><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{data_url(dark)}">'
        f'<img src="{data_url(light)}" alt="{title}"></picture></section>'
    )


def data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
