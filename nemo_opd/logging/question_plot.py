"""Plot of the scores on questions."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

from nemo_opd.logging.base import ClosingTable
from nemo_opd.logging.charts import DASHES, Theme, keys, series
from nemo_opd.logging.facts import Records
from nemo_opd.logging.formats import is_share
from nemo_opd.logging.score_keys import PREFIX, by_set, score_keys

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def question_measures(records: Records) -> list[str]:
    """Return the metrics that are scores of the student; these have an interval."""
    return score_keys(keys(records, PREFIX))


class _Panel(NamedTuple):
    """Scores in one axes."""

    label: str
    scores: Mapping[str, str]
    """Metric by name of the measure."""
    are_shares: bool


def draw_questions(figure: Figure, records: Records, closing: ClosingTable, theme: Theme) -> None:
    """Draw scores over the run with their confidence intervals, and each teacher's as horizontal lines.

    The shares of a set are drawn in one axes, each other score in its own.
    """
    panels = _panels(records)
    figure.set_figheight(0.8 + 2.4 * len(panels))
    for axes, panel in zip(figure.subplots(len(panels), sharex=True, squeeze=False).flat, panels, strict=True):
        _draw(axes, records, panel, theme)


def _panels(records: Records) -> list[_Panel]:
    panels: list[_Panel] = []
    for name, scores in by_set(keys(records, PREFIX)).items():
        shares = {measure: key for measure, key in scores if is_share(measure, *series(records, key)[1])}
        panels += [_Panel(name or "questions", shares, are_shares=True)] if shares else []
        panels += [
            _Panel(name or "questions", {measure: key}, are_shares=False)
            for measure, key in scores
            if measure not in shares
        ]
    return panels


def _draw(axes: Axes, records: Records, panel: _Panel, theme: Theme) -> None:
    from matplotlib.ticker import PercentFormatter

    prefixes = tuple(f"{key}/" for key in panel.scores.values())
    teachers = dict(
        zip(sorted({key.rpartition("/")[2] for key in keys(records, prefixes)}), cycle(DASHES), strict=False)
    )
    for (measure, key), colour in zip(panel.scores.items(), cycle(theme.cycle), strict=False):
        steps, values = series(records, key)
        axes.plot(steps, values, color=colour, marker="o", markersize=4.5, label=measure)
        low, high = series(records, f"{key}_low")[1], series(records, f"{key}_high")[1]
        axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
        for teacher, dashes in teachers.items():
            for value in series(records, f"{key}/{teacher}")[1]:
                axes.axhline(value, color=colour, linestyle=dashes, linewidth=1.2)
    for teacher, dashes in teachers.items():
        axes.plot([], [], color=theme.muted, linestyle=dashes, linewidth=1.2, label=f"teacher {teacher}")
    axes.set_ylabel(panel.label)
    if panel.are_shares:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(-0.02, 1.02)
