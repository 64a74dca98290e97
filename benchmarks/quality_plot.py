"""The plot of `quality.py`: what each setting gains over cross-entropy alone."""

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.figure import Figure
from quality_settings import CONTROL
from quality_statistics import Comparison

from nemo_opd.logging.charts import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from quality_report import Row

COLOURS = {"one teacher": LIGHT.cycle[0], "two teachers": LIGHT.cycle[1]}
BELOW = 0.26
"""Rows between a mean and its seeds, which would hide behind it."""


def png(rows: Sequence["Row"]) -> bytes:
    """Differences to the control, best on top: a dot with its interval, and a small one for each seed."""
    control = next((row for row in rows if row.setting.name == CONTROL), None)
    shown = [row for row in rows if row is not control and row.bits_per_byte and row.bits_per_byte.difference]
    with matplotlib.rc_context({**LIGHT.rc, "font.size": 10}):
        figure = Figure(figsize=(9.6, 1.7 + 0.34 * max(1, len(shown))), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        panel(left, shown, control, lambda row: row.bits_per_byte, "bits per byte, less is better")
        panel(right, shown, control, lambda row: row.accuracy, "next-token accuracy, more is better")
        left.set_yticks(range(len(shown)), [row.setting.name for row in shown])
        left.set_ylim(len(shown) - 0.4, -0.6)
        legend(figure, shown)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()


def panel(
    axes: "Axes",
    rows: Sequence["Row"],
    control: "Row | None",
    measure: Callable[["Row"], Comparison | None],
    title: str,
) -> None:
    base = measure(control) if control else None
    axes.axvline(0, color=LIGHT.text, linewidth=1.2)
    axes.grid(axis="y", visible=False)
    axes.set_title(title)
    at = f", which is at {base.mean.mean:.4f}" if base else ""
    axes.set_xlabel(f"difference to cross-entropy alone{at}")
    for i, row in enumerate(rows):
        comparison = measure(row)
        if comparison is None or comparison.difference is None:
            continue
        colour, difference = COLOURS[row.setting.group], comparison.difference
        if base is not None:
            seeds = [value - base.by_seed[seed] for seed, value in comparison.by_seed.items() if seed in base.by_seed]
            axes.scatter(seeds, [i + BELOW] * len(seeds), s=10, color=colour, alpha=0.6, linewidths=0)
        axes.errorbar(
            difference.mean,
            i,
            xerr=difference.half_width,
            fmt="o",
            markersize=6,
            color=colour,
            capsize=3,
            elinewidth=1.6,
        )


def legend(figure: Figure, rows: Sequence["Row"]) -> None:
    groups = list(dict.fromkeys(row.setting.group for row in rows))
    handles = [matplotlib.lines.Line2D([], [], marker="o", linestyle="", color=COLOURS[group]) for group in groups]
    labels = [f"{group}, mean and 95 % interval over seeds" for group in groups]
    if groups:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(groups))
