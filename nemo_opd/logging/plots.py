"""The figures of a run's report."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nemo_opd.logging.charts import Chart, Theme, keys, series, smooth, write_chart
from nemo_opd.logging.interface import ClosingTable, is_share
from nemo_opd.logging.interface import figure as figure_of
from nemo_opd.logging.metrics import (
    BITS_PER_BYTE,
    OTHER,
    PARTS,
    PREFIX,
    SHARED_BITS_PER_BYTE,
    STEP,
    by_set,
    step_parts,
)
from nemo_opd.logging.records import SKIPPED, Records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_TERMS = {"train/loss": "loss", "train/kd": "KD", "train/ce": "CE"}
_TEACHER, _OVERLAP = "train/kd/", "train/overlap/"
_LEAKAGE, _PRIVILEGE, _CONTRAST = "train/leakage/", "train/privilege_gap/", "train/contrast_gap/"
"""Prefixes of metrics."""
_DASHES = ((0, (5, 3)), (0, (1, 2)), (0, (5, 2, 1, 2)))
"""Line styles of teachers, in turn."""
_SMOOTH_FROM = 60
"""Smallest number of steps for an additional smoothed curve."""
_FLATTENING = 2.5
"""Largest ratio of the longest step to the usual one that keeps the other steps readable."""


@dataclass(frozen=True, slots=True)
class _Plot:
    """A figure of the report, with the metrics that it needs."""

    name: str
    """Name of its file, without `.png`."""
    title: str
    prefixes: tuple[str, ...]
    """Prefixes of its metrics' names."""
    draw: Callable[[Figure, Records, ClosingTable, Theme], None]
    height: float = 3.5
    """Inches; the width is 6.2."""
    least: int = 1
    """Number of metrics needed to draw it."""

    def has_data(self, records: Records) -> bool:
        return len(keys(records, self.prefixes)) >= self.least

    def write(self, folder: Path, records: Records, closing: ClosingTable) -> Chart:
        path, size = folder / f"{self.name}.png", (6.2, self.height)
        return write_chart(path, self.title, lambda figure, theme: self.draw(figure, records, closing, theme), size)


def draw_questions(figure: Figure, records: Records, closing: ClosingTable, theme: Theme) -> None:
    """Draw scores over the run with their confidence intervals, and each teacher's as horizontal lines.

    The shares of a set are drawn in one axes, each other score in its own.
    """
    panels = _panels(records)
    figure.set_figheight(0.8 + 2.4 * len(panels))
    for axes, panel in zip(figure.subplots(len(panels), sharex=True, squeeze=False).flat, panels, strict=True):
        _draw_panel(axes, records, panel, theme)


class _Panel(NamedTuple):
    """Scores in one axes."""

    label: str
    scores: Mapping[str, str]
    """Metric by name of the measure."""
    are_shares: bool


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


def _draw_panel(axes: Axes, records: Records, panel: _Panel, theme: Theme) -> None:
    from matplotlib.ticker import PercentFormatter

    prefixes = tuple(f"{key}/" for key in panel.scores.values())
    teachers = dict(
        zip(sorted({key.rpartition("/")[2] for key in keys(records, prefixes)}), cycle(_DASHES), strict=False)
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


def draw_loss(figure: Figure, records: Records, closing: ClosingTable, theme: Theme) -> None:
    """Draw the loss and its terms, except terms that are always 0 or equal the loss, and the skipped steps."""
    axes = figure.subplots()
    values = {key: series(records, key)[1] for key in _TERMS}
    for (key, label), colour in zip(_TERMS.items(), theme.cycle, strict=False):
        is_the_loss = key != "train/loss" and values[key] == values["train/loss"]
        if any(values[key]) and not is_the_loss:
            _curve(axes, records, key, label, colour)
    if skipped := not_taken(records):
        heights, at_the_bottom = [0.03] * len(skipped), axes.get_xaxis_transform()
        axes.plot(skipped, heights, "x", color=theme.text, transform=at_the_bottom, label="step not taken")
    axes.set_ylabel("nats")


def not_taken(records: Records) -> list[float]:
    """Return the steps that were skipped."""
    steps, totals = series(records, SKIPPED)
    return [step for step, (previous, total) in zip(steps, pairwise([0, *totals]), strict=True) if total > previous]


def _draw_teachers(figure: Figure, records: Records, closing: ClosingTable, theme: Theme) -> None:
    axes = figure.subplots()
    _curves(axes, records, _TEACHER, theme.cycle)
    axes.set_ylabel("KD, nats")


def _draw_validation(figure: Figure, records: Records, closing: ClosingTable, theme: Theme) -> None:
    """Draw the student over the run, and each teacher as a horizontal line, all over shared bytes."""
    axes = figure.subplots()
    key, label = BITS_PER_BYTE, "bits per byte"
    if closing.teachers:
        key, label = SHARED_BITS_PER_BYTE, "bits per byte\n(shared bytes)"
    axes.plot(*series(records, key), color=theme.cycle[0], marker="o", markersize=4.5, label="student")
    for row, colour in zip(closing.teachers, cycle(theme.cycle[1:]), strict=False):
        if row.shared_bits_per_byte is not None:
            axes.axhline(row.shared_bits_per_byte, color=colour, linestyle=_DASHES[0], linewidth=1.5, label=row.name)
    axes.margins(y=0.08)
    axes.set_ylabel(label)


def _draw_rollouts(figure: Figure, records: Records, closing: ClosingTable, theme: Theme) -> None:
    """Draw length and entropy of the student's responses, and the share of top tokens in common with each teacher."""
    lengths, entropy, overlap = figure.subplots(3, 1, sharex=True)
    _curve(lengths, records, "rollout/response_length", "tokens a response", theme.cycle[0])
    _curve(entropy, records, "train/entropy", "entropy, nats a token", theme.cycle[1])
    _curves(overlap, records, _OVERLAP, (*theme.cycle[2:], *theme.cycle[:2]), "top tokens shared with ")
    for axes in (lengths, entropy, overlap):
        if axes.lines:
            axes.set_ylim(0, 1.12 * axes.dataLim.y1 or 1)


def _draw_contexts(figure: Figure, records: Records, closing: ClosingTable, theme: Theme) -> None:
    """Draw the gain of teachers from their contexts, and how much of the contexts the student repeats."""
    gaps, leakage = figure.subplots(2, 1, sharex=True)
    _curves(gaps, records, _PRIVILEGE, theme.cycle, "context of ")
    _curves(gaps, records, _CONTRAST, theme.cycle[::-1], "another record's, of ")
    _curves(leakage, records, _LEAKAGE, theme.cycle)
    gaps.set_ylabel("nats a token")
    leakage.set_ylabel("share that leaks")
    leakage.set_ylim(0, 1.12 * leakage.dataLim.y1 or 1)


def _draw_optimizer(figure: Figure, records: Records, closing: ClosingTable, theme: Theme) -> None:
    upper, lower = figure.subplots(2, 1, sharex=True)
    _curve(upper, records, "train/grad_norm", "gradient norm", theme.cycle[0])
    upper.set_ylim(bottom=0)
    lower.plot(*series(records, "train/lr"), color=theme.cycle[2], label="learning rate")
    lower.set_ylim(bottom=0)


def _draw_speed(figure: Figure, records: Records, closing: ClosingTable, theme: Theme) -> None:
    from matplotlib.ticker import EngFormatter

    axes = figure.subplots()
    _curve(axes, records, "perf/tokens_per_s", "student tokens per second", theme.cycle[0])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def draw_step_time(figure: Figure, records: Records, closing: ClosingTable, theme: Theme) -> None:
    """Draw the parts of a step: medians as bars, and all steps over the run."""
    steps, parts = parts_by_step(records)
    if not steps:
        return
    colours = dict(zip(parts, (*theme.cycle, theme.text), strict=False)) | {OTHER: theme.muted}
    medians = {name: statistics.median(values) for name, values in parts.items()}
    if len(steps) == 1:
        figure.set_figheight(0.32 * len(parts) + 0.6)
        _draw_bars(figure.subplots(), medians, colours, theme)
        return
    bars, axes = figure.subplots(2, 1, height_ratios=(0.32 * len(parts) + 0.2, 2.6))
    _draw_bars(bars, medians, colours, theme)
    smoothed = [smooth(values) for values in parts.values()]
    axes.stackplot(steps, *smoothed, colors=[colours[name] for name in parts], linewidth=0)
    _limit_height(axes, steps, [sum(times) for times in zip(*smoothed, strict=True)], theme)
    axes.set_ylabel("seconds a step")


def parts_by_step(records: Records) -> tuple[list[float], dict[str, list[float]]]:
    """Return the steps and the seconds of each part per step, without parts that never take time."""
    timed = [(record["step"], parts) for record in records if (parts := step_parts(record))]
    names = [name for name in (*PARTS, OTHER) if any(parts.get(name) for _, parts in timed)]
    return [step for step, _ in timed], {name: [parts.get(name, 0.0) for _, parts in timed] for name in names}


def _draw_bars(axes: Axes, medians: Mapping[str, float], colours: Mapping[str, str], theme: Theme) -> None:
    total = sum(medians.values()) or 1.0
    names, widths = list(medians), list(medians.values())
    axes.barh(names, widths, color=[colours[name] for name in names], height=0.72)
    for row, width in enumerate(widths):
        label = f" {figure_of(width)} s, {width / total:.0%}"
        axes.text(width, row, label, va="center", color=theme.muted, fontsize=10)
    axes.set_xlim(0, 1.28 * max(widths) or 1.0)
    axes.invert_yaxis()
    axes.grid(False)
    axes.xaxis.set_visible(False)
    axes.tick_params(axis="y", labelcolor=theme.text)
    axes.spines["bottom"].set_visible(False)


def _limit_height(axes: Axes, steps: Sequence[float], totals: Sequence[float], theme: Theme) -> None:
    """Show all steps in full, unless a few slow ones, such as the first, would flatten the curve.

    Those are cut at the top and labelled with their time.
    """
    usual, most = sorted(totals)[int(0.98 * (len(totals) - 1))], max(totals)
    if most <= _FLATTENING * usual:
        axes.set_ylim(0, 1.05 * most or 1)
        return
    top = 1.3 * usual or most
    axes.set_ylim(0, top)
    for step, total in zip(steps, totals, strict=True):
        if total > top:
            axes.annotate(
                f"\N{BLACK UP-POINTING TRIANGLE} {figure_of(total)} s", (step, 0.985 * top), va="top",
                ha="left" if step < steps[-1] / 2 else "right", fontsize=9, color=theme.text,
                bbox={"facecolor": theme.background, "edgecolor": "none", "pad": 1.5, "alpha": 0.85},
            )  # fmt: skip


def _curve(axes: Axes, records: Records, key: str, label: str, colour: str) -> None:
    steps, values = series(records, key)
    if not steps:
        return
    if len(steps) < _SMOOTH_FROM:
        axes.plot(steps, values, color=colour, label=label, marker="o" if len(steps) < 12 else None, markersize=4)
        return
    axes.plot(steps, values, color=colour, alpha=0.28, linewidth=0.9)
    axes.plot(steps, smooth(values), color=colour, label=label)


def _curves(axes: Axes, records: Records, prefix: str, colours: Sequence[str], label: str = "") -> None:
    """Draw a curve for each metric with the prefix, named by `label` and the part after the prefix."""
    for key, colour in zip(keys(records, prefix), cycle(colours), strict=False):
        _curve(axes, records, key, label + key.removeprefix(prefix), colour)


PLOTS = (
    _Plot("questions", "Questions answered", (PREFIX,), draw_questions),
    _Plot("loss", "Training loss", tuple(_TERMS), draw_loss),
    _Plot("validation", "Validation", ("val/bits_per_byte",), _draw_validation),
    _Plot("teachers", "Distillation loss by teacher", (_TEACHER,), _draw_teachers, least=2),
    _Plot("rollouts", "The student's samples", ("rollout/response_length",), _draw_rollouts, height=5.2),
    _Plot("contexts", "Contexts of teachers", (_LEAKAGE,), _draw_contexts, height=4.4),
    _Plot("optimizer", "Optimizer", ("train/lr", "train/grad_norm"), _draw_optimizer, height=4.4),
    _Plot("speed", "Speed", ("perf/tokens_per_s",), _draw_speed, height=2.8),
    _Plot("step_time", "Parts of the step time", (STEP,), draw_step_time, height=5.2),
)
