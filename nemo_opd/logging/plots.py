"""Curves of a run, as PNG in a light and a dark theme.

Figures are made without pyplot: it would look for a display and keep them open.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nemo_opd.files import write_atomically
from nemo_opd.logging.base import ClosingTable
from nemo_opd.logging.facts import SKIPPED, Records
from nemo_opd.logging.formats import figure as figure_of
from nemo_opd.logging.score_keys import score_keys
from nemo_opd.logging.step_time import OTHER, PARTS, STEP, step_parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TERMS = {"train/loss": "loss", "train/kd": "KD", "train/ce": "CE"}
_TEACHER, _OVERLAP, _QUESTIONS = "train/kd/", "train/overlap/", "eval/"
_LEAKAGE, _PRIVILEGE, _CONTRAST = "train/leakage/", "train/privilege_gap/", "train/contrast_gap/"
"""Prefixes of metrics."""
_SMOOTH_FROM = 60
"""Steps from which a curve is also drawn smoothed; fewer are readable as they are."""
_FLATTENING = 2.5
"""Ratio of the longest step to the usual one up to which the others stay readable."""
_DASHES = ((0, (5, 3)), (0, (1, 2)), (0, (5, 2, 1, 2)))
"""Line styles of teachers, one after the other."""


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


# The Okabe-Ito hues, which colour-blind people can tell apart, lightened on dark ground.
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


@dataclass(frozen=True, slots=True)
class _Plot:
    """A figure of the report: the metrics it needs, and how it is drawn."""

    name: str
    """Name of its file, without `.png`."""
    title: str
    prefixes: tuple[str, ...]
    """Starts of the names of its metrics."""
    draw: Callable[[Figure, Records, ClosingTable, Theme], None]
    height: float = 3.5
    """Inches; the width is 6.2."""
    least: int = 1
    """Number of such metrics from which it is drawn."""

    def has_data(self, records: Records) -> bool:
        return len(_keys(records, self.prefixes)) >= self.least

    def write(self, folder: Path, records: Records, closing: ClosingTable) -> _Chart:
        path, size = folder / f"{self.name}.png", (6.2, self.height)
        return write_chart(path, self.title, lambda figure, theme: self.draw(figure, records, closing, theme), size)


class _Chart(NamedTuple):
    """A PNG for either theme."""

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
) -> _Chart:
    """Draw a figure in both themes and write the light one, with a legend above each axes and steps below the last.

    size: width and height in inches.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    images = []
    for theme in (LIGHT, _DARK):
        with matplotlib.rc_context(theme.rc):
            figure = Figure(figsize=size, layout="constrained")
            draw(figure, theme)
            for axes in figure.axes:
                _add_legend(axes, legend_columns)
            for axes in figure.axes[-1:]:
                axes.set_xlabel("step")
                axes.margins(x=0.02)
                axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))
                axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=180)
        images.append(buffer.getvalue())
    write_atomically(path, images[0])
    return _Chart(title, *images)


def _add_legend(axes: Axes, columns: int) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(
            loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncol=columns, borderaxespad=0.2, handlelength=1.4,
            columnspacing=1.4,
        )  # fmt: skip


def series(records: Records, key: str) -> tuple[list[float], list[float]]:
    """Return steps and values of one metric, where it was recorded."""
    points = [(record["step"], record[key]) for record in records if key in record]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean over a fortieth of the curve around each point, over less at its ends; skips NaN and infinity."""
    finite = [math.isfinite(value) for value in values]
    totals = [0.0, *accumulate(value if kept else 0.0 for value, kept in zip(values, finite, strict=True))]
    counts = [0, *accumulate(map(int, finite))]
    last, widest = len(values) - 1, len(values) // 80
    averages = []
    for i in range(len(values)):
        # symmetric, because a window that only looks back lags behind a falling curve
        half = min(widest, i, last - i)
        count = counts[i + half + 1] - counts[i - half]
        averages.append((totals[i + half + 1] - totals[i - half]) / count if count else math.nan)
    return averages


def _keys(records: Records, prefixes: str | tuple[str, ...]) -> list[str]:
    return sorted({key for record in records for key in record if key.startswith(prefixes)})


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
    """Draw a curve for each metric with the prefix; its name follows `label`."""
    for key, colour in zip(_keys(records, prefix), cycle(colours), strict=False):
        _curve(axes, records, key, label + key.removeprefix(prefix), colour)


def draw_loss(figure: Figure, records: Records, closing: ClosingTable, theme: Theme) -> None:
    """Draw the loss and its terms, without terms that are 0 throughout or equal the loss, and steps not taken."""
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
    """Return the steps at which the number of skipped steps grows."""
    steps, totals = series(records, SKIPPED)
    return [step for step, (before, total) in zip(steps, pairwise([0, *totals]), strict=True) if total > before]


def _draw_teachers(figure: Figure, records: Records, closing: ClosingTable, theme: Theme) -> None:
    axes = figure.subplots()
    _curves(axes, records, _TEACHER, theme.cycle)
    axes.set_ylabel("KD, nats")


def _draw_validation(figure: Figure, records: Records, closing: ClosingTable, theme: Theme) -> None:
    """Draw the student over the run, and each teacher as a level line."""
    axes = figure.subplots()
    steps, bits = series(records, "val/bits_per_byte")
    axes.plot(steps, bits, color=theme.cycle[0], marker="o", markersize=4.5, label="student")
    for row, colour in zip(closing.teachers, cycle(theme.cycle[1:]), strict=False):
        if row.bits_per_byte is not None:
            axes.axhline(row.bits_per_byte, color=colour, linestyle=_DASHES[0], linewidth=1.5, label=row.name)
    axes.margins(y=0.08)
    axes.set_ylabel("bits per byte")


def question_measures(records: Records) -> list[str]:
    """Return the metrics that are scores of the student, which have an interval."""
    return score_keys(_keys(records, _QUESTIONS))


def draw_questions(figure: Figure, records: Records, closing: ClosingTable, theme: Theme) -> None:
    """Draw shares of questions over the run, with their confidence intervals; each teacher's as level lines."""
    from matplotlib.ticker import PercentFormatter

    axes = figure.subplots()
    colours = dict(zip(question_measures(records), cycle(theme.cycle), strict=False))
    for key, colour in colours.items():
        steps, values = series(records, key)
        axes.plot(steps, values, color=colour, marker="o", markersize=4.5, label=key.removeprefix(_QUESTIONS))
        low, high = series(records, f"{key}_low")[1], series(records, f"{key}_high")[1]
        axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
    known = _keys(records, _QUESTIONS)
    teachers = sorted({key.removeprefix(f"{own}/") for own in colours for key in known if key.startswith(f"{own}/")})
    for teacher, dashes in zip(teachers, cycle(_DASHES), strict=False):
        axes.plot([], [], color=theme.muted, linestyle=dashes, linewidth=1.2, label=f"teacher {teacher}")
        for key, colour in colours.items():
            for value in series(records, f"{key}/{teacher}")[1]:
                axes.axhline(value, color=colour, linestyle=dashes, linewidth=1.2)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(-0.02, 1.02)


def _draw_rollouts(figure: Figure, records: Records, closing: ClosingTable, theme: Theme) -> None:
    """Draw length and entropy of the student's responses, and the top tokens they share with each teacher."""
    lengths, entropy, overlap = figure.subplots(3, 1, sharex=True)
    _curve(lengths, records, "rollout/response_length", "tokens a response", theme.cycle[0])
    _curve(entropy, records, "train/entropy", "entropy, nats a token", theme.cycle[1])
    _curves(overlap, records, _OVERLAP, (*theme.cycle[2:], *theme.cycle[:2]), "top tokens shared with ")
    for axes in (lengths, entropy, overlap):
        if axes.lines:
            axes.set_ylim(0, 1.12 * axes.dataLim.y1 or 1)


def _draw_contexts(figure: Figure, records: Records, closing: ClosingTable, theme: Theme) -> None:
    """Draw what teachers gain by their contexts, and how much of these the student repeats."""
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
    lower.yaxis.set_major_formatter(lambda rate, _: f"{rate:.2g}")


def _draw_speed(figure: Figure, records: Records, closing: ClosingTable, theme: Theme) -> None:
    from matplotlib.ticker import EngFormatter

    axes = figure.subplots()
    _curve(axes, records, "perf/tokens_per_s", "student tokens per second", theme.cycle[0])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def draw_step_time(figure: Figure, records: Records, closing: ClosingTable, theme: Theme) -> None:
    """Draw the parts of a step: their medians as bars, and all of them over the run."""
    steps, parts = parts_by_step(records)
    if not steps:
        return
    bars, axes = figure.subplots(2, 1, height_ratios=(0.32 * len(parts) + 0.2, 2.6))
    colours = dict(zip(parts, (*theme.cycle, theme.text), strict=False)) | {OTHER: theme.muted}
    _draw_bars(bars, {name: statistics.median(values) for name, values in parts.items()}, colours, theme)
    smoothed = [smooth(values) for values in parts.values()]
    axes.stackplot(steps, *smoothed, colors=[colours[name] for name in parts], linewidth=0)
    _limit_height(axes, steps, [sum(times) for times in zip(*smoothed, strict=True)], theme)
    axes.set_ylabel("seconds a step")


def _limit_height(axes: Axes, steps: Sequence[float], totals: Sequence[float], theme: Theme) -> None:
    """Show every step whole, unless a few that waited, such as the first, would flatten the others.

    Those are cut at the top and marked with their time.
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
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    axes.tick_params(axis="y", labelcolor=theme.text)
    axes.spines["bottom"].set_visible(False)


def parts_by_step(records: Records) -> tuple[list[float], dict[str, list[float]]]:
    """Return steps, and the seconds of each part in each of them, without parts that never take time."""
    timed = [(record["step"], parts) for record in records if (parts := step_parts(record))]
    names = [name for name in (*PARTS, OTHER) if any(parts.get(name) for _, parts in timed)]
    return [step for step, _ in timed], {name: [parts.get(name, 0.0) for _, parts in timed] for name in names}


PLOTS = (
    _Plot("questions", "Questions answered", (_QUESTIONS,), draw_questions),
    _Plot("loss", "Training loss", tuple(_TERMS), draw_loss),
    _Plot("validation", "Validation", ("val/bits_per_byte",), _draw_validation),
    _Plot("teachers", "Distillation loss by teacher", (_TEACHER,), _draw_teachers, least=2),
    _Plot("rollouts", "What the student samples", ("rollout/response_length",), _draw_rollouts, height=5.2),
    _Plot("contexts", "Contexts of teachers", (_LEAKAGE,), _draw_contexts, height=4.4),
    _Plot("optimizer", "Optimizer", ("train/lr", "train/grad_norm"), _draw_optimizer, height=4.4),
    _Plot("speed", "Speed", ("perf/tokens_per_s",), _draw_speed, height=2.8),
    _Plot("step_time", "Where the time of a step goes", (STEP,), draw_step_time, height=5.2),
)
