"""Checks of the metrics that decide which checkpoint is best, and when a run ends."""

import difflib
from collections.abc import Iterator

from nemo_opd.config.run_fields import RunFields


def check_chosen_metrics(config: RunFields) -> None:
    """Raise ValueError for a metric that no validation or evaluation of the run gives, or only the last one."""
    for key, chosen in (("keep_best", config.train.keep_best), ("early_stopping", config.train.early_stopping)):
        if chosen is None:
            continue
        known = list(_validated(config)) + list(_evaluated(config))
        if chosen.metric not in known and not _is_of_a_benchmark(config, chosen.metric):
            close = difflib.get_close_matches(chosen.metric, known, n=3, cutoff=0.4) or known
            named = f"; there are {', '.join(close)}" if close else "; set data.validation or evaluation"
            raise ValueError(
                f"train.{key}.metric={chosen.metric}: no validation or evaluation of this run gives it{named}"
            )
        is_validated = chosen.metric.startswith("val/")
        every = "train.validate_every" if is_validated else "evaluation.every"
        if (config.train.validate_every if is_validated else config.evaluation and config.evaluation.every) is None:
            raise ValueError(
                f"train.{key}.metric={chosen.metric}: it is known after the last step alone, so that nothing can be "
                f"chosen by it; set {every}"
            )


def _validated(config: RunFields) -> Iterator[str]:
    if not config.data.validation.given:
        return
    yield from ("val/loss", "val/ce", "val/bits_per_byte", "val/accuracy")
    if config.active_teachers:
        yield from ("val/kd", *(f"val/kd/{name}" for name in config.active_names))


def _evaluated(config: RunFields) -> Iterator[str]:
    evaluation = config.evaluation
    if evaluation is None:
        return
    for name, questions in (evaluation.all_sets or {"": evaluation}).items():
        prefix = f"eval/{name}/" if name else "eval/"
        yield from (f"{prefix}pass@{k}" for k in questions.k)
        yield from (f"{prefix}maj@{k}" for k in questions.k if k > 1)
        yield f"{prefix}mean@{questions.n}"
        if questions.greedy:
            yield f"{prefix}greedy"


def _is_of_a_benchmark(config: RunFields, metric: str) -> bool:
    """Return whether a metric has the name of a benchmark, whose tasks alone know their figures."""
    names = [] if config.evaluation is None else [each.label for each in config.evaluation.benchmarks]
    return any(metric.startswith(f"eval/{name}/") for name in names)
