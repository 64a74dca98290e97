"""Figures of the real-model benchmark: bits per byte of each setting, with its seeds and interval, and curves of CE."""

import io
from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure

from benchmarks.quality_statistics import interval
from benchmarks.real_models.outcomes import Outcome
from benchmarks.real_models.settings import Experiment
from benchmarks.real_models.tables import bits, of, settings_of
from nemo_opd.logging.charts import LIGHT

_SMOOTHED_OVER = 5
"""Steps of a moving mean."""


def results_png(outcomes: Sequence[Outcome], experiment: Experiment, title: str) -> bytes | None:
    """Draw bits per byte after training, a dot for each mean with its interval; None without results."""
    chosen = [(setting, of(outcomes, setting)) for setting in settings_of(experiment)]
    chosen = [(setting, own) for setting, own in chosen if own]
    if not chosen:
        return None
    with matplotlib.rc_context({**LIGHT.rc, "font.size": 10}):
        figure = Figure(figsize=(9.0, 1.6 + 0.34 * len(chosen)), layout="constrained")
        axes = figure.subplots()
        for place, (_, own) in enumerate(chosen):
            found = interval([bits(each) for each in own])
            axes.errorbar(found.mean, place, xerr=found.half_width, fmt="o", color=LIGHT.cycle[0], capsize=3)
            axes.scatter([bits(each) for each in own], [place + 0.25] * len(own), s=9, color=LIGHT.cycle[0], alpha=0.6)
        teacher = next((each.teacher["all"] for _, own in chosen for each in own if "all" in each.teacher), None)
        if teacher is not None:
            axes.axvline(teacher, color=LIGHT.text, linewidth=1.2, label="the original")
            axes.legend()
        axes.set_yticks(range(len(chosen)), [setting.name for setting, _ in chosen])
        axes.set_ylim(len(chosen) - 0.4, -0.6)
        axes.set_xlabel("bits per byte of the validation texts, less is better")
        axes.set_title(title)
        return _png(figure)


def curves_png(outcomes: Sequence[Outcome], experiment: Experiment, metric: str, title: str) -> bytes | None:
    """Draw a metric over the steps, of the first seed; None without results."""
    chosen = [(setting, of(outcomes, setting)) for setting in settings_of(experiment)]
    drawn = [(setting, own[0].curves[metric]) for setting, own in chosen if own and metric in own[0].curves]
    if not drawn:
        return None
    with matplotlib.rc_context({**LIGHT.rc, "font.size": 10}):
        figure = Figure(figsize=(9.0, 4.4), layout="constrained")
        axes = figure.subplots()
        for i, (setting, points) in enumerate(drawn):
            steps, values = zip(*_smoothed(points), strict=True)
            style = ("-", "--", ":")[i // len(LIGHT.cycle) % 3]
            axes.plot(steps, values, style, color=LIGHT.cycle[i % len(LIGHT.cycle)], label=setting.name)
        axes.set_xlabel("step")
        axes.set_ylabel(metric)
        axes.set_title(title)
        axes.legend(fontsize=8)
        return _png(figure)


def _smoothed(points: list[list[float]]) -> list[tuple[float, float]]:
    if len(points) <= 2 * _SMOOTHED_OVER:
        return [(step, value) for step, value in points]
    windows = [points[max(0, i + 1 - _SMOOTHED_OVER) : i + 1] for i in range(len(points))]
    return [(window[-1][0], sum(value for _, value in window) / len(window)) for window in windows]


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
