"""Names of scores in metrics: `eval/<measure>`, `eval/<set>/<measure>`, and with `/<teacher>` appended."""

from collections.abc import Collection

from nemo_opd.logging.formats import is_mean

PREFIX = "eval/"


def score_keys(metrics: Collection[str]) -> list[str]:
    """Return the names of the student's scores, which have an interval, in the order of `metrics`."""
    return [
        key for key in metrics if key.startswith(PREFIX) and f"{key}_low" in metrics and not _is_teachers(key, metrics)
    ]


def _is_teachers(key: str, metrics: Collection[str]) -> bool:
    """Return whether a name is a teacher's score or a bound of one; these end with the teacher's name."""
    measure, _, teacher = key.rpartition("/")
    scores = {measure, measure.removesuffix("_low"), measure.removesuffix("_high")}
    return any(all(f"{score}{end}/{teacher}" in metrics for end in ("", "_low", "_high")) for score in scores)


def by_set(metrics: Collection[str]) -> dict[str, list[tuple[str, str]]]:
    """Return (measure, name) of each set's scores, except mean rewards; greedy scores come first."""
    sets: dict[str, list[tuple[str, str]]] = {}
    scores = (key for key in score_keys(metrics) if not is_mean(key))
    for key in sorted(scores, key=lambda key: not key.endswith("/greedy")):
        name, _, measure = key.removeprefix(PREFIX).rpartition("/")
        sets.setdefault(name, []).append((measure, key))
    return sets
