"""Off-policy distillation: the student learns the teachers' distributions on a corpus."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_opd.checkpoint.run_directory import identity
from nemo_opd.cluster.local import driving
from nemo_opd.config.composition import from_yaml
from nemo_opd.config.run import RunConfig
from nemo_opd.data.loader import lost_workers
from nemo_opd.errors import ConfigError
from nemo_opd.logging.metrics import Timer
from nemo_opd.logging.records import BASELINE
from nemo_opd.logging.scores import VALIDATION_LOG, TextLog
from nemo_opd.logging.terminal import VisibleConsole, busy, print_line
from nemo_opd.preflight.inputs import require_kind
from nemo_opd.preflight.plan import Plan, preflight
from nemo_opd.preflight.summary import print_plan
from nemo_opd.training.cache_build import fill_caches
from nemo_opd.training.finished import Finished
from nemo_opd.training.session import Session
from nemo_opd.training.step_metrics import objective_values, step_times, useful_positions
from nemo_opd.workers.step import POSITIONS


def distil(config: RunConfig, callbacks: Sequence[Any] = (), session_type: type[Session] = Session) -> Finished | None:
    """Run to the end, or until a checkpoint after an interrupt. session_type: kind of run, off-policy by default.

    Returns the run's output, or None on ranks other than the driver. Raises an OPDError if the run fails.
    """
    require_kind(config, on_policy=session_type.samples)
    with driving(config.cluster) as is_driver:
        return drive(config, callbacks, session_type) if is_driver else None


def drive(
    config: RunConfig,
    callbacks: Sequence[Any] = (),
    session_type: type[Session] = Session,
    continued_in: Path | None = None,
) -> Finished:
    """Run preflight, then train with this process as the driver; return the run's output.

    continued_in: output directory of the run to continue after an interrupt, if not this one.
    """
    inputs = "data" if config.rollout is None else "prompts"
    with busy(f"checking settings, models, tokenizers and {inputs}"):
        plan = preflight(config)
    if config.run.dry_run:
        return Finished(plan.output_dir, checks=print_plan(plan, VisibleConsole()))
    if config.run.baseline is True and not _trained_baseline(plan):
        return Finished(plan.output_dir, is_complete=False)
    fill_caches(plan)
    with lost_workers(), session_type(plan, callbacks, continued_in) as session:
        train(session)
    return Finished(plan.output_dir, session.is_complete)


def _trained_baseline(plan: Plan) -> bool:
    """Train the same steps without teachers, unless that is done; return False if it was interrupted."""
    config, folder = plan.config, plan.output_dir / BASELINE
    if plan.started_from is not None:
        raise ConfigError(
            f"run.baseline=true: the run started from {plan.started_from}, and its baseline would start from "
            f"student.model={config.student.model}; leave run.baseline out, or write the former as student.model"
        )
    baseline, log = _without_teachers(plan, folder), TextLog(folder / VALIDATION_LOG)
    if config.run.resume == "auto" and log.at(plan.total_steps) is not None:
        if identity(from_yaml(folder / "config.yaml")) != identity(baseline):
            raise ConfigError(
                f"run.baseline=true: the baseline in {folder} was trained with other settings; restore them, or choose "
                "another run.output_dir"
            )
        return True
    print_line(f"baseline  the same {plan.total_steps:,} steps without teachers first, in {folder}")
    return drive(baseline, continued_in=plan.output_dir).is_complete


def _without_teachers(plan: Plan, folder: Path) -> RunConfig:
    """Return the settings of the same run by cross-entropy alone, in another folder."""
    config = plan.config
    loss = {"kd_weight": 0.0, "ce_weight": config.loss.ce_weight or 1.0, "scaling": "fixed"}
    train = {"max_steps": plan.total_steps, "epochs": None, "early_stopping": None, "keep_best": None}
    run = {
        "name": f"{config.run.name}-baseline",
        "output_dir": folder,
        "baseline": False,
        "push_to_hub": None,
        "callbacks": (),
        "export_worse": True,
    }
    return config.model_copy(
        update={
            "loss": config.loss.model_copy(update=loss),
            "train": config.train.model_copy(update=train),
            "run": config.run.model_copy(update=run),
            "evaluation": None,
            "logging": config.logging.model_copy(update={"gradients_every": None}),
        }
    )


def train(session: Session) -> None:
    """Train until the last step, early stopping or an interrupt; then finish the run or print how to continue it."""
    config = session.config
    session.measure_start()
    for step in session.steps():
        record = train_step(session) | session.step_values()
        if session.is_due(config.train.validate_every) and session.plan.data.validation is not None:
            record |= session.validate()
        is_last = session.patience.ends_with(record)
        if config.evaluation is not None and (is_last or session.is_due(config.evaluation.every)):
            record |= session.evaluate()
        session.loggers.log(step, record)
        session.watch(record)
        if session.is_to_be_saved:
            session.save()
    if session.is_complete:
        session.finish()
    else:
        session.print_how_to_continue()


def train_step(session: Session) -> dict[str, float]:
    """Make one optimizer step (batch, teachers, student) and return its record."""
    timer = Timer()
    scale = session.kd_scale.value
    with timer.span("step_s"):
        scored = session.lookahead.next(timer)
    gaps = session.privilege_gaps(scored.batch)  # before the update: with the weights that read the batch
    with timer.span("step_s"):
        metrics = session.models.train_step(scored, scale, compare_gradients=session.compares_gradients)
    peak_memory, positions = metrics.pop("peak_memory_gb").value(), metrics.pop(POSITIONS).value()
    record = objective_values(session.config, metrics, scale, "train") | gaps
    session.count_step(metrics)
    teachers = dict(zip(session.config.active_names, scored.seconds, strict=True))
    times = step_times(timer.take(), metrics, teachers)
    seconds = times["perf/step_s"]
    return {
        "epoch": session.lookahead.epoch,
        **record,
        "train/kd_scale": scale,
        "train/skipped_steps": session.skipped.total,
        "perf/tokens_per_s": record["train/student_tokens"] / seconds,
        **session.plan.utilization.values(scored.batch, seconds),
        **useful_positions(scored, positions, session.config.active_names),
        **times,
        **{f"perf/retried/{name}": number for name, number in scored.retried.items()},
        **{f"perf/unanswered/{name}": number for name, number in scored.unanswered.items()},
        "perf/peak_memory_gb": peak_memory,
    }
