"""Resources and progress of a run."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from nemo_opd.checkpoint.manager import Progress
from nemo_opd.checkpoint.run_directory import RunLock, checkpoints_of, identity
from nemo_opd.cluster.local import open_cluster
from nemo_opd.config.composition import to_yaml
from nemo_opd.errors import ConfigError
from nemo_opd.evaluation.validation import PER_TEXT, validate, validate_teachers
from nemo_opd.files import write_atomically
from nemo_opd.logging.loggers import Loggers, build, json_line
from nemo_opd.logging.metrics import BITS_PER_BYTE, SHARED_BITS_PER_BYTE
from nemo_opd.logging.metrics import values as values_of
from nemo_opd.logging.provenance import (
    ENDED_EARLY,
    FAILED,
    FINISHED,
    INTERRUPTED,
    NOT_EXPORTED,
    record_end,
    write_provenance,
)
from nemo_opd.logging.records import write_hardware
from nemo_opd.logging.report import write_report
from nemo_opd.logging.scores import SAMPLE_LOG, VALIDATION_LOG, SampleLog, TextBits, TextLog
from nemo_opd.logging.terminal import print_line
from nemo_opd.preflight.corpus import Corpus
from nemo_opd.preflight.plan import Plan
from nemo_opd.preflight.summary import run_summary
from nemo_opd.progress import tracked, working
from nemo_opd.rollout.engine_interface import Engine
from nemo_opd.training.batches import BatchSource, Lookahead
from nemo_opd.training.closing import closing_table
from nemo_opd.training.engines import open_engine
from nemo_opd.training.evaluator import BestSteps, Evaluator, Patience, continued_texts
from nemo_opd.training.interrupt import Interrupt, TimeLimit
from nemo_opd.training.models import Models
from nemo_opd.training.saving import Saving, export_best, export_models, provenance, push_export, write_cards
from nemo_opd.training.step_metrics import KDScale, SkippedSteps, first_kd_warnings, objective_values
from nemo_opd.types import Batch, Mean, Metrics, PerText
from nemo_opd.users_code import Callbacks

_VALIDATION, _EVALUATION = "validation", "evaluation"


class _StoppedError(Exception):
    """Interrupt before the first step; `measure_start` catches it."""


class Session:
    """Cluster, models, data, loggers and checkpoints of one run. All are closed on exit, also after an error."""

    samples: ClassVar[bool] = False
    """Whether the run is on-policy."""
    engine: Engine
    """Engine that samples from the student; set only if the run samples or has `evaluation`."""
    evaluator: Evaluator
    """Evaluator; set only with `evaluation`."""

    def __init__(self, plan: Plan, callbacks: Sequence[Any] = (), continued_in: Path | None = None) -> None:
        """callbacks: added to those in `run.callbacks`. continued_in: as for `off_policy.drive`."""
        self.plan = plan
        self.config = plan.config
        self.callbacks = Callbacks(self.config.run.callbacks, callbacks)
        self.step = 0
        self.kd_scale = KDScale(self.config.loss)
        self.skipped = SkippedSteps(self.config)
        self.best = BestSteps(self.config.train.keep_best)
        self.patience = Patience(self.config.train.early_stopping)
        self.checkpoints = checkpoints_of(self.config, plan.output_dir)
        self._continued_in = continued_in or plan.output_dir
        self.time_limit = TimeLimit(self.config.train.save_before, plan.checkpoint_bytes)
        self.start: dict[str, float] = {}
        """Bits per byte of the student before training and of the teachers, under their logged names."""
        self.validated: dict[str, float] = {}
        """`val/*` of the student at its last validation."""
        self._validated_at = -1
        self._is_best = False
        self._end = ENDED_EARLY
        self._error_type: type[BaseException] | None = None

    def __enter__(self) -> Self:
        plan, config, progress = self.plan, self.config, self.plan.progress
        with ExitStack() as stack:
            stack.enter_context(RunLock(plan.output_dir))
            self._require_unchanged_checkpoints()
            self.checkpoints.remove_incomplete()
            for step in plan.damaged_steps:
                self.checkpoints.set_aside(step)
            self.texts = TextLog(plan.output_dir / VALIDATION_LOG)
            self.texts.truncate_after(0 if progress is None else progress.step)
            self.loggers: Loggers = stack.enter_context(build(config.logging, plan.output_dir))
            self.source: BatchSource = self.open_source()
            stack.enter_context(self.source)
            if progress is not None:
                self._restore_driver(progress)
            write_atomically(plan.output_dir / "config.yaml", to_yaml(config).encode())
            summary = run_summary(plan)
            write_hardware(summary)
            write_provenance(plan.output_dir, provenance(plan, summary))
            stack.push(self._record_end)
            records = plan.output_dir / "metrics.jsonl"
            if lacks_records := self.step > 0 and not records.exists():
                write_atomically(records, json_line(0, self.start).encode())
            self.loggers.start(summary, self.step)
            if lacks_records:
                self.loggers.warn(f"{plan.output_dir} had no metrics.jsonl; curves begin after step {self.step}")
            if not self.is_complete:
                self.source.start()
            if config.cluster.launcher == "ray":
                self.loggers.phase(f"starting Ray and {plan.placement.num_processes} workers")
            # Entered before the cluster, so it exits after it, when no worker writes any more.
            saving = Saving(self.checkpoints, plan.checkpoint_bytes, plan.student_layout.size, self._on_saved)
            self.saving = stack.enter_context(saving)
            cluster = stack.enter_context(open_cluster(config.cluster, plan.device, plan.placement))
            self.loggers.phase("loading the student" + (" and its teachers" if config.active_teachers else ""))
            self.models: Models = stack.enter_context(Models(cluster, plan))
            if progress is not None:
                self.loggers.phase(f"reading the checkpoint of step {progress.step}")
                self.models.load(self.checkpoints.path(progress.step))
            self.connect(stack)
            self.lookahead = Lookahead(
                self.source, self.models, depth=plan.lookahead, steps=range(self.step + 1, plan.total_steps + 1)
            )
            self.interrupt = stack.enter_context(Interrupt(self.loggers.warn))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self._error_type = kind
        with working("ending the workers"), self._stack:
            if kind is not None:
                self.loggers.end_display()
            if isinstance(error, KeyboardInterrupt):
                error.add_note(self.how_to_continue())

    def _record_end(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the end of the run into its directory. kind: class of an error at the start or while closing."""
        kind = self._error_type or kind
        if kind is not None:
            self._end = INTERRUPTED if issubclass(kind, KeyboardInterrupt) else FAILED
        record_end(self.plan.output_dir, self._end)

    def _require_unchanged_checkpoints(self) -> None:
        """Raise ConfigError if another run has written checkpoints since preflight."""
        planned = self.plan.progress.step if self.plan.progress else None
        newest = max(set(self.checkpoints.steps()) - set(self.plan.damaged_steps), default=None)
        if newest != planned:
            raise ConfigError(
                f"run.output_dir={self.plan.output_dir}: another run has just written a checkpoint of step {newest} "
                "there; start again with run.resume=auto to continue it, or name another directory"
            )

    def _restore_driver(self, progress: Progress) -> None:
        self.step = progress.step
        self.kd_scale.load_state_dict(progress.kd_scale)
        self.skipped.load_state_dict(progress.skipped_steps)
        self.best.load_state(progress.best)
        self.patience.load_state(progress.stopping)
        self.start = dict(progress.bits_per_byte)
        self.source.load_state_dict(progress.loader)

    def open_source(self) -> BatchSource:
        """Open the source of training batches."""
        corpus = self.plan.data
        assert isinstance(corpus, Corpus)
        return corpus.loader(self.config)

    def connect(self, stack: ExitStack) -> None:
        """Open resources that need the loaded models, before the first batch; `stack` closes them."""
        if self.config.evaluation is not None:
            self.engine = stack.enter_context(open_engine(self.plan, self.models, self.step))
            self.evaluator = Evaluator(self.plan, self.models, self.loggers.warn, stack, self.step)

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps until the last one, early stopping, an interrupt or `train.save_before`."""
        self.time_limit.begin()
        while not self.is_complete and not self.interrupt.requested:
            self.saving.end_if_written()
            self.step += 1
            yield self.step
        self.saving.end()

    @property
    def is_complete(self) -> bool:
        return self.step == self.plan.total_steps or self.patience.is_over

    @property
    def is_to_be_saved(self) -> bool:
        """Whether the current step gets a checkpoint."""
        return self.is_due(self.config.train.save_every) or self.interrupt.requested or self._is_best

    def is_due(self, every: int | None) -> bool:
        """Return whether something done every `every` steps, and after the last step, is due now."""
        return self.is_complete or _is_due(self.step, every)

    def _evaluations_after(self, step: int) -> list[str]:
        """Return the kinds of evaluation due after a step, under the names that `time_limit` is given."""
        evaluation = self.config.evaluation
        kinds = {_VALIDATION: self.config.train.validate_every}
        kinds |= {} if evaluation is None else {_EVALUATION: evaluation.every}
        return [kind for kind, every in kinds.items() if step == self.plan.total_steps or _is_due(step, every)]

    def privilege_gaps(self, batch: Batch) -> dict[str, float]:
        """Measure the gaps due at this step; return `train/privilege_gap/*` and `train/contrast_gap/*`."""
        contexts = enumerate(teacher.context for teacher in self.config.active_teachers)
        due = [i for i, context in contexts if context and context.gap_every and self.step % context.gap_every == 0]
        gaps = self.models.privilege_gaps(batch, due) if due else {}
        measured = {name: gap for name, gap in gaps.items() if gap.count}
        return {f"train/{name}": value for name, value in values_of(measured).items()}

    @property
    def compares_gradients(self) -> bool:
        every = self.config.logging.gradients_every
        return every is not None and self.step % every == 0

    def count_step(self, metrics: Metrics) -> None:
        """Update the KD scale from the step's reduced metrics, or count a skipped step and warn of it."""
        warning = self.skipped.observe(self.step, metrics)
        if warning is None:
            self.kd_scale.update(metrics)
        else:
            self.loggers.warn(warning)

    def watch(self, record: Mapping[str, float]) -> None:
        """Read the logged record: decide whether the run ends and whether this step is among the best.

        Raises NotFiniteError after too many skipped steps.
        """
        self.skipped.require_progress()
        if self.step == 1:
            for warning in first_kd_warnings(self.config, self.plan.student_vocab_size, self.plan.device, record):
                self.loggers.warn(f"step 1: {warning}")
        self._is_best = self.best.observe(self.step, record)
        self.patience.observe(record)
        if self.callbacks.on_step(self.step, record):
            self.interrupt.requested = True
        if self.patience.is_over:
            self.loggers.warn(f"step {self.step}: {self.patience.reason}")
        if self.time_limit.is_up(self._evaluations_after(self.step + 1)) and not self.is_complete:
            self.loggers.warn(
                f"step {self.step}: another step might leave no time to save before train.save_before="
                f"{self.config.train.save_before}; saving and ending"
            )
            self.interrupt.requested = True

    def measure_start(self) -> None:
        """Validate and evaluate before the first step of a new run, and log the result unless interrupted."""
        if self.step:
            return
        with suppress(_StoppedError):
            if values := self.values_at_start():
                self.loggers.log(0, values)
                self.patience.observe(values)
                self.callbacks.on_start(values)

    def values_at_start(self) -> dict[str, float]:
        """Return the metrics of student and teachers from validation and evaluation, if the run has these."""
        values = {} if self.plan.data.validation is None else self._validate_all()
        settings = self.config.evaluation
        if settings is None:
            return values
        self.end_before_first_step()
        values |= self.evaluate()
        for i, teacher in enumerate(self.config.active_names if settings.teachers else ()):
            self.end_before_first_step()
            self.loggers.phase(f"asking the teacher {teacher}")
            values |= self.evaluator.teacher(i)
        return values

    def step_values(self) -> dict[str, float]:
        """Return the step's metrics that only this kind of run has."""
        return {}

    def evaluate(self) -> dict[str, float]:
        """Evaluate the student with its current weights and return `eval/*`."""
        self.loggers.phase("asking the student")
        with self.time_limit.evaluating(_EVALUATION):
            self.update_engine()
            figures = self.evaluator.student(self.engine, self.step)
            self.engine.rest()
        return figures

    def update_engine(self) -> None:
        """Give the engine the student's current weights."""
        self.engine.follow(self.step)

    def _validate_all(self) -> dict[str, float]:
        """Validate student and teachers and return `val/*`."""
        self.loggers.phase("validating the student" + (" and its teachers" if self.config.active_teachers else ""))
        values = self.validate()
        self.continue_texts()
        metrics = validate_teachers(self.models, self._validation_batches("validating the teachers"))
        # A teacher without routed validation texts has no bytes.
        measured = {name: metric for name, metric in metrics.items() if not isinstance(metric, Mean) or metric.count}
        teachers = {f"val/{name}": value for name, value in values_of(measured).items()}
        totals = [f"{SHARED_BITS_PER_BYTE}/{name}" for name in self.config.active_names]
        self._warn_of_not_finite({name: teachers[name] for name in totals if name in teachers})
        values |= teachers
        self.start = {name: values[name] for name in (BITS_PER_BYTE, SHARED_BITS_PER_BYTE, *totals) if name in values}
        return values

    def validate(self) -> dict[str, float]:
        """Validate the student with its current weights and return `val/*`."""
        with self.time_limit.evaluating(_VALIDATION):
            metrics = validate(self.models, self._validation_batches("validating the student"))
        texts = metrics.pop(PER_TEXT, None)
        if isinstance(texts, PerText) and all(map(math.isfinite, texts.bits)):
            self.texts.add(TextBits(self.step, texts.bits, texts.num_bytes))
        named = objective_values(self.config, metrics, self.kd_scale.value, "val")
        self.validated, self._validated_at = named, self.step
        self._warn_of_not_finite(named)
        return named

    def continue_texts(self) -> None:
        """Write the student's continuations of a few validation texts with its current weights."""
        if texts := continued_texts(self.plan, self.models, self.step):
            SampleLog(self.plan.output_dir / SAMPLE_LOG).write_continued(self.step, texts)

    def _warn_of_not_finite(self, validated: Mapping[str, float]) -> None:
        if not_finite := [f"{name} is {value}" for name, value in validated.items() if not math.isfinite(value)]:
            self.loggers.warn(f"validation after step {self.step}: {', '.join(not_finite)}")

    def _validation_batches(self, name: str) -> Iterator[Batch]:
        """Yield the validation batches. name: shown by the progress display.

        Raises _StoppedError if interrupted before the first step.
        """
        data, batch_size = self.plan.data, self.config.train.global_batch_size
        assert data.validation is not None
        number = -(-len(data.validation) // batch_size)
        for batch in tracked(data.validation_batches(batch_size), name, "batches", number):
            self.end_before_first_step()
            yield batch

    def end_before_first_step(self) -> None:
        """Raise _StoppedError if the run is interrupted before its first step."""
        if not self.step and self.interrupt.requested:
            raise _StoppedError

    def save(self) -> None:
        """Write a checkpoint of this step; with `train.async_save` only begin to write it.

        `Progress` is the driver's part, which `_restore_driver` reads; `StudentWorker.save` writes the ranks' part.
        """
        progress = Progress(
            step=self.step,
            loader=self.lookahead.state_dict(),
            kd_scale=self.kd_scale.state_dict(),
            skipped_steps=self.skipped.state_dict(),
            bits_per_byte=self.start,
            best=self.best.state(),
            stopping=self.patience.state(),
            settings=identity(self.config),
            started_from=self.plan.started_from,
        )
        self.saving.save(self.models, progress, in_background=self.config.train.async_save)

    def _on_saved(self, step: int, seconds: float) -> None:
        self.time_limit.saved(seconds)
        self.callbacks.on_save(step, self.checkpoints.path(step))

    def print_how_to_continue(self) -> None:
        ended = f"after step {self.step}" if self.step else "before the first step"
        print_line(f"ended early {ended}; {self.how_to_continue()}", sys.stderr)

    def how_to_continue(self) -> str:
        """Return a sentence about the newest checkpoint and how to continue from it."""
        steps = self.checkpoints.steps()
        if not steps:
            return "there is no checkpoint yet, so there is nothing to continue"
        return (
            f"the checkpoint is {self.checkpoints.path(steps[-1])}; to continue, repeat the command with "
            f"run.output_dir={self._continued_in} run.resume=auto"
        )

    def finish(self) -> None:
        """Export the student and its averaged weights, write the report and print the closing table.

        Raises NotFiniteError if the student has diverged and, at the very end, HubError if the push fails.
        """
        self.interrupt.effect = "the last step is done, and the run finishes"
        if self._validated_at < self.step and self.plan.data.validation is not None:
            self.validate()  # a finished run was started again, or the run ended early
        self.skipped.require_sound_end(self.validated.get(BITS_PER_BYTE))
        if self.skipped.in_a_row:
            self.loggers.warn(
                f"the last {self.skipped.in_a_row} steps were skipped, so the model has the weights of step "
                f"{self.step - self.skipped.in_a_row}; it may have diverged"
            )
        self.loggers.phase("writing the model and the report")
        folder = self.plan.output_dir
        self.continue_texts()
        closing = closing_table(self.config, folder, self.start, self.validated, self.step)
        # On-policy the student may well leave the data's texts behind while its rewards rise.
        is_exported = self.config.run.export_worse or self.config.rollout is not None or not closing.verdict.is_worse
        if is_exported:
            export_models(self.plan, self.models)
        else:
            self.loggers.warn(
                "the student is worse than before training, so it was not exported or pushed; to do that, continue the "
                f"run with run.output_dir={folder} run.resume=auto run.export_worse=true"
                + (f"; {folder / 'final'} is the student of an earlier end" if (folder / "final").exists() else "")
            )
        best = export_best(self.plan, self.best, self.checkpoints, None if is_exported else self.start)
        if best is None and (settings := self.config.train.keep_best) is not None:
            self.loggers.warn(
                f"no best/ was exported: no kept checkpoint is better than the start in {settings.metric} "
                "(train.keep_best)"
            )
        closing = replace(closing, best=best, is_exported=is_exported)
        write_cards(self.plan, closing, self.start, self.step)
        write_report(folder, closing)
        self.loggers.summary(closing)
        push = self.config.run.push_to_hub
        if push is not None and (is_exported or (push.model == "best" and best is not None)):
            push_export(self.plan, push)
        self._end = FINISHED if is_exported else NOT_EXPORTED


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
