"""Formatting of numbers, in ASCII."""

import math
import re

_NO_SHARES = {"perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "brier_score", "likelihood_diff"} | {
    *("mse", "mcc", "bleu", "chrf", "ter")
}
"""Metrics of lm-eval that are not shares of questions, even if they lie between 0 and 1."""
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def figure(value: float) -> str:
    """Format with three decimals, or three significant digits below 0.1."""
    if value and not 1e-3 <= abs(value) < 1e4:
        return f"{value:.2e}"
    return f"{value:#.3g}" if 0 < abs(value) < 0.1 else f"{value:.3f}"


def amount(value: float) -> str:
    """Format a count with a unit: 950, 12.3k, 4.56M."""
    for size, unit in _UNITS:
        if abs(value) >= size:
            return f"{value / size:#.3g}".rstrip(".") + unit
    return f"{value:.0f}"


def clock(seconds: float) -> str:
    """Format a duration: 1:05, 2:03:04, 3d 02:00."""
    if not math.isfinite(seconds):
        return "-"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"


def change(ratio: float | None) -> str:
    """Format a relative change: -12.3 %; empty for None."""
    return "" if ratio is None else f"{ratio:+.1%}".replace("%", " %")


def share(value: float) -> str:
    """Format a share: 68.5 %."""
    return f"{100 * value:.1f} %"


def score_texts(value: float, low: float, high: float, *, is_share: bool) -> tuple[str, str]:
    """Format a score and its interval: 68.5 % and 60.1 to 75.9 %; plain numbers if it is not a share."""
    form = share if is_share else figure
    return form(value), f"{form(low).removesuffix(' %')} to {form(high)}"


def score(value: float, low: float, high: float, *, is_share: bool) -> str:
    """Format a score with its interval: 68.5 % (60.1 to 75.9 %)."""
    return "{} ({})".format(*score_texts(value, low, high, is_share=is_share))


def is_mean(measure: str) -> bool:
    """Return whether a measure is a mean of rewards, which need not be a share."""
    return measure.rpartition("/")[2].startswith("mean@")


def is_share(measure: str, *values: float) -> bool:
    """Return whether values of a measure are shares, written in per cent: between 0 and 1, and not a perplexity."""
    return _NO_SHARES.isdisjoint(re.split(r"[./]", measure)) and all(0 <= value <= 1 for value in values)


def difference(value: float, low: float, high: float, *, is_share: bool) -> str:
    """Format a difference of scores: +3.1 ± 1.2 points; plain numbers if it is not of shares."""
    half = (high - low) / 2
    if not is_share:
        return f"{value:+.3f} ± {half:.3f}"
    return f"{100 * value:+.1f} ± {100 * half:.1f} points"
