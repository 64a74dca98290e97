"""Sample rows of a projection as a picture: student tokens × the teacher tokens in their rows."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_opd.errors import ProjectionError
from nemo_opd.projection.samples import Sample, counted_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FONT = "DejaVu Sans Mono"
"""Font that comes with matplotlib. It has no CJK; characters it lacks are written as escapes."""
_MAX_LABEL = 20
"""Characters of a token's label; longer ones are shortened in the middle."""
_CELL = 0.27
"""Width of a cell in inches."""


def plot_samples(samples: Sequence[Sample], path: str | PathLike[str], title: str = "") -> None:
    """Write a PNG: one row per sample, one column per teacher token, weights as colours and numbers; ● marks exact
    rows.

    Raises ProjectionError if it cannot be written. The file is complete or absent.
    """
    image = io.BytesIO()
    heat_map(samples, title).savefig(image, dpi=150, format="png", bbox_inches="tight", pad_inches=0.15)
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(image.getvalue())
        temporary.replace(target)
    except OSError as error:
        raise ProjectionError(f"cannot write the heat map to {target}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def heat_map(samples: Sequence[Sample], title: str = "") -> Figure:
    """Draw the figure of `plot_samples`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys(entry.id for sample in samples for entry in sample.entries))
    labels = {entry.id: entry.token for sample in samples for entry in sample.entries}
    weights = _weights(samples, columns)
    size = (3.4 + _CELL * max(8, len(columns)), 2.6 + _CELL * max(4, len(samples)))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    mesh = axes.imshow(np.ma.masked_equal(weights, 0), cmap="Blues", vmin=-0.15, vmax=1.05, aspect="equal")
    _label_axes(axes, samples, [labels[column] for column in columns])
    _write_weights(axes, weights)
    _separate_kinds(axes, samples, len(columns))
    axes.set_title(title or f"{len(samples)} sample rows", loc="left", fontsize=10, pad=12, parse_math=False)
    bar = figure.colorbar(mesh, ax=axes, shrink=min(1.0, 9 / size[1]), aspect=30, pad=0.01, label="weight")
    bar.ax.set_ylim(0, 1)
    return figure


def _weights(samples: Sequence[Sample], columns: Sequence[int]) -> NDArray[np.float64]:
    place = {column: i for i, column in enumerate(columns)}
    weights = np.zeros((max(1, len(samples)), max(1, len(columns))))
    for row, sample in enumerate(samples):
        for entry in sample.entries:
            weights[row, place[entry.id]] = entry.weight
    return weights


def _label_axes(axes: Axes, samples: Sequence[Sample], columns: Sequence[str]) -> None:
    rows = [f"{label(sample.token)} {'●' if sample.exact else ' '}" for sample in samples]
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(range(len(columns)), [label(column) for column in columns], rotation=90)
    for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        text.set(fontfamily=_FONT, fontsize=7.5, parse_math=False)
    axes.set_xlabel("teacher tokens")
    axes.set_ylabel("student tokens  (● exact)")
    axes.set_xticks(np.arange(0.5, max(1, len(columns))), minor=True)
    axes.set_yticks(np.arange(0.5, max(1, len(rows))), minor=True)
    axes.grid(which="minor", color="0.92", linewidth=0.5)
    axes.tick_params(which="both", length=0)
    for spine in axes.spines.values():
        spine.set_edgecolor("0.8")


def _write_weights(axes: Axes, weights: NDArray[np.float64]) -> None:
    for row, column in np.argwhere(weights > 0).tolist():
        weight = weights[row, column]
        text = "1" if weight >= 0.9995 else f"{weight:.2g}".removeprefix("0")
        colour = "white" if weight > 0.55 else "0.25"
        axes.text(column, row, text, ha="center", va="center", fontsize=5.5, color=colour)


def _separate_kinds(axes: Axes, samples: Sequence[Sample], num_columns: int) -> None:
    """Draw a line between kinds, and each kind's name at the right edge."""
    start = 0
    for kind, group in groupby(samples, key=lambda sample: sample.kind):
        end = start + len(list(group))
        if start:
            axes.axhline(start - 0.5, color="0.45", linewidth=0.8)
        place = (max(1, num_columns) - 0.6, start - 0.35)
        axes.text(*place, kind, ha="right", va="top", fontsize=8, color="0.45", style="italic")
        start = end


def label(token: str) -> str:
    """Write a token of `shown_token` in the font's characters: white-space runs are counted, others escaped."""
    if token[:1] in "'\"":
        token = token[1:-1]
    return _shorten("".join(c if _has_glyph(c) else _escape(c) for c in counted_runs(token)))


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL // 2]}…{text[-(_MAX_LABEL // 2 - 1) :]}"


@cache
def _has_glyph(character: str) -> bool:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties(family=_FONT)))
    return character.isprintable() and font.get_char_index(ord(character)) > 0
