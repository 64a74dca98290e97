"""Names of scores among metrics: `eval/<measure>`, `eval/<set>/<measure>`, and with `/<teacher>` appended."""

from collections.abc import Collection

from nemo_opd.logging.formats import is_mean

PREFIX = "eval/"


def score_keys(known: Collection[str]) -> list[str]:
    """Return the names of the student's scores, which have an interval, in the order of `known`."""
    return [key for key in known if key.startswith(PREFIX) and f"{key}_low" in known and not _is_teachers(key, known)]


def _is_teachers(key: str, known: Collection[str]) -> bool:
    """Return whether a name is a teacher's score or a bound of it, which have the teacher's name last."""
    measure, _, teacher = key.rpartition("/")
    scores = {measure, measure.removesuffix("_low"), measure.removesuffix("_high")}
    return any(all(f"{score}{end}/{teacher}" in known for end in ("", "_low", "_high")) for score in scores)


def by_set(known: Collection[str]) -> dict[str, list[tuple[str, str]]]:
    """Return measure and name of the scores of each set but mean rewards; that of the likeliest answers first."""
    sets: dict[str, list[tuple[str, str]]] = {}
    shown = (key for key in score_keys(known) if not is_mean(key))
    for key in sorted(shown, key=lambda key: not key.endswith("/greedy")):
        name, _, measure = key.removeprefix(PREFIX).rpartition("/")
        sets.setdefault(name, []).append((measure, key))
    return sets
