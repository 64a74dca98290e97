"""Numbers for people, in ASCII."""

import math
from collections.abc import Callable

UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def figure(value: float) -> str:
    """Three decimals, three significant digits below 0.1."""
    if value and not 1e-3 <= abs(value) < 1e4:
        return f"{value:.2e}"
    return f"{value:#.3g}" if 0 < abs(value) < 0.1 else f"{value:.3f}"


def amount(value: float) -> str:
    """A count with a unit: 950, 12.3k, 4.56M."""
    for size, unit in UNITS:
        if abs(value) >= size:
            return f"{value / size:#.3g}".rstrip(".") + unit
    return f"{value:.0f}"


def clock(seconds: float) -> str:
    """1:05, 2:03:04, 3d 02:00."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def change(ratio: float | None) -> str:
    """-12.3 %; empty where unknown."""
    return "" if ratio is None else f"{ratio:+.1%}".replace("%", " %")


def share(value: float) -> str:
    """68.5 %."""
    return f"{100 * value:.1f} %"


def score(measure: str, value: float, low: float, high: float) -> str:
    """68.5 % (60.1 to 75.9 %), of questions; a mean of rewards that are no shares as it is."""
    form = score_form(measure, low, high)
    return f"{form(value)} ({interval(low, high, form)})"


def score_form(measure: str, low: float, high: float) -> Callable[[float], str]:
    """`share`, or `figure` for a mean of rewards that are no shares. low, high: of its interval."""
    return figure if measure.startswith("mean@") and not 0 <= low <= high <= 1 else share


def interval(low: float, high: float, form: Callable[[float], str]) -> str:
    """60.1 to 75.9 %."""
    return f"{form(low).removesuffix(' %')} to {form(high)}"
