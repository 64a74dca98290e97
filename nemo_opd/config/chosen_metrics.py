"""Checks of the metrics that select the best checkpoint and stop a run early."""

import difflib
from collections.abc import Iterator

from nemo_opd.config.run_fields import RunFields


def check_chosen_metrics(config: RunFields) -> None:
    """Raise ValueError for a metric that the run does not measure, or measures only after the last step."""
    for key, setting in (("keep_best", config.train.keep_best), ("early_stopping", config.train.early_stopping)):
        if setting is None:
            continue
        metric = setting.metric
        measured = [*_validation_metrics(config), *_evaluation_metrics(config)]
        if metric not in measured and not _is_benchmark_metric(config, metric):
            close = difflib.get_close_matches(metric, measured, n=3, cutoff=0.4) or measured
            way_out = f"; there are {', '.join(close)}" if close else "; set data.validation or evaluation"
            raise ValueError(f"train.{key}.metric={metric}: no validation or evaluation of this run gives it{way_out}")
        is_validated = metric.startswith("val/")
        every = "train.validate_every" if is_validated else "evaluation.every"
        if (config.train.validate_every if is_validated else config.evaluation and config.evaluation.every) is None:
            raise ValueError(
                f"train.{key}.metric={metric}: it is measured only after the last step, too late to choose by; set "
                f"{every}"
            )


def _validation_metrics(config: RunFields) -> Iterator[str]:
    if not config.data.validation.given:
        return
    yield from ("val/loss", "val/ce", "val/bits_per_byte", "val/accuracy")
    if config.active_teachers:
        yield from ("val/kd", *(f"val/kd/{name}" for name in config.active_names))


def _evaluation_metrics(config: RunFields) -> Iterator[str]:
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


def _is_benchmark_metric(config: RunFields, metric: str) -> bool:
    """Return whether a metric's name starts with a benchmark's; only the benchmark knows its full names."""
    names = [] if config.evaluation is None else [benchmark.label for benchmark in config.evaluation.benchmarks]
    return any(metric.startswith(f"eval/{name}/") for name in names)
