"""Curves of one metric for several runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from nemo_opd.logging.charts import Theme, series, smooth
from nemo_opd.logging.facts import Records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DASHED_FROM = 6
"""Number of solid curves, one for each colour."""


def draw_runs(figure: Figure, theme: Theme, runs: Sequence[tuple[str, Records]], key: str, label: str) -> None:
    """Draw the smoothed curve of each run, with the metric's confidence interval if it has one."""
    axes = figure.subplots()
    for i, ((name, records), colour) in enumerate(zip(runs, cycle(theme.cycle), strict=False)):
        steps, values = series(records, key)
        if not steps:
            continue
        style, marker = "-" if i < _DASHED_FROM else "--", "o" if len(steps) < 12 else None
        axes.plot(steps, smooth(values), style, color=colour, label=name, marker=marker, markersize=4)
        low, high = series(records, f"{key}_low")[1], series(records, f"{key}_high")[1]
        if len(low) == len(high) == len(steps):
            axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set_ylabel(label)
