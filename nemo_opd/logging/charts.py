"""Figures as PNG in a light and a dark theme, and the curves of metrics in records.

Figures are created without pyplot, which would look for a display and keep them open.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nemo_opd.files import ELSEWHERE, write_atomically
from nemo_opd.logging.interface import is_mean, pass_at_1
from nemo_opd.logging.metrics import score_keys
from nemo_opd.logging.records import Records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 180
_LEGEND_WIDTH = 0.85
"""Share of a figure's width that a legend may take; the axis labels are to its left."""
_MAX_LABEL = 44
"""Length in characters up to which a label is shown in full; longer ones would collapse the axes."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of a figure and of the page around it."""

    background: str
    text: str
    muted: str
    grid: str
    cycle: tuple[str, ...]
    """Colours of curves."""

    @property
    def rc(self) -> dict[str, object]:
        """The theme as matplotlib settings."""
        return {
            **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), self.background),
            **dict.fromkeys(("text.color", "axes.titlecolor"), self.text),
            **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), self.muted),
            **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), self.grid),
            **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left", "legend.frameon"), False),
            **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
            "grid.linewidth": 0.6,
            "ytick.major.size": 0,
            "axes.titlelocation": "left",
            "axes.titlesize": 12,
            "axes.titleweight": "bold",
            "font.size": 11,
            "font.family": "DejaVu Sans",
            "legend.fontsize": 10,
            "lines.linewidth": 1.8,
            "lines.solid_capstyle": "round",
        }


# The Okabe-Ito hues, distinguishable by colour-blind people; lighter on the dark background.
LIGHT = Theme(
    background="#ffffff",
    text="#1c2330",
    muted="#5b6472",
    grid="#dfe3e8",
    cycle=("#0072b2", "#d55e00", "#009e73", "#b8527f", "#a67c00", "#4d4d4d"),
)
_DARK = Theme(
    background="#171b22",
    text="#e6e9ee",
    muted="#9aa4b2",
    grid="#303844",
    cycle=("#56b4e9", "#f0824a", "#2fc79b", "#e39bc0", "#e6c229", "#b5b5b5"),
)


class Chart(NamedTuple):
    """PNGs for both themes."""

    title: str
    light: bytes
    dark: bytes


def write_chart(
    path: Path,
    title: str,
    draw: Callable[[Figure, Theme], None],
    size: tuple[float, float],
    *,
    legend_columns: int = 4,
    instead: str = ELSEWHERE,
) -> Chart:
    """Draw a figure in both themes and write the light one, with a legend above each axes and a step axis below the
    last.

    size: width and height in inches. instead: advice if the file cannot be written.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator, ScalarFormatter

    images = []
    for theme in (LIGHT, _DARK):
        with matplotlib.rc_context(theme.rc):
            figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
            draw(figure, theme)
            for axes in figure.axes:
                if type(axes.yaxis.get_major_formatter()) is ScalarFormatter:
                    # its common factor, such as 1e5, would be written above the axes, where the legend is
                    axes.yaxis.set_major_formatter("{x:.6g}")
                _label_single_points(axes, theme)
                _add_legend(axes, legend_columns, _LEGEND_WIDTH * figure.bbox.width)
            for axes in figure.axes[-1:]:
                axes.set_xlabel("step")
                axes.margins(x=0.02)
                axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
                axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            buffer = io.BytesIO()
            # savefig would draw twice
            FigureCanvasAgg(figure).print_png(buffer)
        images.append(buffer.getvalue())
    write_atomically(path, images[0], instead=instead)
    return Chart(title, *images)


def _label_single_points(axes: Axes, theme: Theme) -> None:
    """Draw curves of one point as a dot, with its value if no other curve could run through it."""
    curves = {
        line: [(float(x), float(y)) for x, y in line.get_xydata().tolist() if math.isfinite(y)]  # type: ignore[union-attr]
        for line in axes.get_lines()
        if line.get_transform() == axes.transData
    }
    for line, points in curves.items():
        if len(points) != 1:
            continue
        line.set_marker("o")
        if max(map(len, curves.values())) == 1:
            label = axes.yaxis.get_major_formatter()(points[0][1])
            axes.annotate(label, points[0], (7, 0), textcoords="offset points", va="center", color=theme.text)


def _shortened(label: str) -> str:
    """Return a label that fits into a figure: the start and end of a long one."""
    half = _MAX_LABEL // 2 - 1
    return label if len(label) <= _MAX_LABEL else f"{label[:half]}…{label[-half:]}"


def _add_legend(axes: Axes, most_columns: int, width: float) -> None:
    """Add a legend with as many columns as fit into a width in pixels; a wider one would narrow the axes."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    for columns in range(most_columns, 0, -1):
        legend = axes.legend(
            handles, list(map(_shortened, labels)), loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncol=columns,
            borderaxespad=0.2, handlelength=2.4, columnspacing=1.4,
        )  # fmt: skip
        if legend.get_window_extent().width < width:
            return


def series(records: Records, key: str) -> tuple[list[float], list[float]]:
    """Return the steps and values of a metric's records."""
    points = [(record["step"], record[key]) for record in records if key in record]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean over a fortieth of the curve around each point, less at its ends, skipping NaN and infinity."""
    finite = [math.isfinite(value) for value in values]
    totals = [0.0, *accumulate(value if ok else 0.0 for value, ok in zip(values, finite, strict=True))]
    counts = [0, *accumulate(map(int, finite))]
    last, widest = len(values) - 1, len(values) // 80
    averages = []
    for i in range(len(values)):
        # symmetric: a window that only looks back lags behind a falling curve
        half = min(widest, i, last - i)
        count = counts[i + half + 1] - counts[i - half]
        averages.append((totals[i + half + 1] - totals[i - half]) / count if count else math.nan)
    return averages


def keys(records: Records, prefixes: str | tuple[str, ...]) -> list[str]:
    return sorted({key for record in records for key in record if key.startswith(prefixes)})


def question_measures(records: Records) -> list[str]:
    """Return the metrics that are scores of the student, without mean rewards that equal pass@1 of the same set."""
    scores = score_keys(dict.fromkeys(key for record in records for key in record))
    return [
        key
        for key in scores
        if not is_mean(key) or any(record[key] != record.get(pass_at_1(key)) for record in records if key in record)
    ]
