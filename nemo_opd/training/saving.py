"""Writing of a run's checkpoints, synchronously or in the background, and export of its models with their cards."""

import math
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from nemo_opd.alignment.pieces import pieces_of
from nemo_opd.checkpoint.manager import STUDENT, CheckpointManager, Progress
from nemo_opd.checkpoint.shards import require_whole
from nemo_opd.config.run import RunConfig
from nemo_opd.config.run_fields import PushToHub
from nemo_opd.config.secrets import leaves, without_secrets
from nemo_opd.config.teacher import OwnIdsTeacher, Teacher
from nemo_opd.data.document_sources import data_commit
from nemo_opd.errors import HubError
from nemo_opd.files import copy_whole, size_below
from nemo_opd.logging.card import Exported, write_card
from nemo_opd.logging.interface import Best, ClosingTable, RunSummary, TeacherSummary
from nemo_opd.logging.provenance import ModelOrigin, Provenance
from nemo_opd.logging.records import MovedRow, write_projections
from nemo_opd.logging.terminal import print_line
from nemo_opd.models.adapter_folder import hub_commit
from nemo_opd.models.folder import OwnCard, push, read_own_card
from nemo_opd.models.load import tokenizer_of
from nemo_opd.paths import package_version
from nemo_opd.preflight.corpus import Corpus
from nemo_opd.preflight.model_info import ModelSize
from nemo_opd.preflight.plan import Plan
from nemo_opd.progress import working
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.projection.display import entries_of, short_name, shown_token
from nemo_opd.teacher_cache.shard import read_manifest
from nemo_opd.training.closing import closing_at
from nemo_opd.training.evaluator import BestSteps
from nemo_opd.training.models import Models
from nemo_opd.workers.student_model import PROJECTIONS

_LIBRARIES = ("torch", "transformers", "tokenizers", "peft")
_NUM_ROWS = 20
"""Number of rows per projection in the report."""


class Saving:
    """Writer of a run's checkpoints, one at a time. One that is incomplete when the run ends is removed."""

    def __init__(
        self, checkpoints: CheckpointManager, num_bytes: int, num_ranks: int, on_saved: Callable[[int, float], None]
    ) -> None:
        """num_bytes: estimated size of a checkpoint. num_ranks: ranks of the student.

        on_saved: called with step and seconds when a checkpoint is complete.
        """
        self._checkpoints = checkpoints
        self._num_bytes = num_bytes
        self._num_ranks = num_ranks
        self._on_saved = on_saved
        self._current: _UnfinishedCheckpoint | None = None

    def save(self, models: Models, progress: Progress, *, in_background: bool) -> None:
        """Wait for the previous checkpoint, then write one. Raises CheckpointError if the disk does not take it.

        in_background: only start to write it; `end` completes it.
        """
        self.end()
        start = time.monotonic()
        with ExitStack() as stack:
            folder = stack.enter_context(self._checkpoints.writing(progress, self._num_bytes))
            with self._working(progress.step, folder):
                models.save(folder, in_background)
            self._current = _UnfinishedCheckpoint(progress.step, models, folder, start, stack.pop_all())
        if not in_background:
            self.end()

    def end_if_written(self) -> None:
        """Complete the current checkpoint if all of its files are written."""
        if self._current is not None and self._current.models.is_saved():
            self.end()

    def end(self) -> None:
        """Wait for the current checkpoint, if any, and complete it. Raises the errors of writing."""
        if self._current is None:
            return
        current, self._current = self._current, None
        with current.stack:
            with self._working(current.step, current.folder):
                current.models.end_save()
            # Check before it becomes the newest checkpoint and older ones are removed.
            require_whole(current.folder, self._num_ranks)
        self._on_saved(current.step, time.monotonic() - current.start)

    def _working(self, step: int, folder: Path) -> AbstractContextManager[object]:
        name = f"writing the checkpoint of step {step}"
        return working(name, self._num_bytes, "B", measure=lambda: size_below(folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the incomplete checkpoint of a failed run. No worker may be writing any more."""
        if self._current is not None:
            with suppress(_GivenUpError), self._current.stack:
                raise _GivenUpError


@dataclass(frozen=True)
class _UnfinishedCheckpoint:
    """Checkpoint that is being written."""

    step: int
    models: Models
    folder: Path
    start: float
    """Value of `time.monotonic`."""
    stack: ExitStack
    """Completes the checkpoint if closed without an error."""


class _GivenUpError(Exception):
    """Abandonment of an incomplete checkpoint; its context removes the files."""


def export_models(plan: Plan, models: Models) -> None:
    """Write the student to final/ and each average of its weights to final_<teacher>/."""
    final = plan.output_dir / "final"
    models.export(final)
    _write_learned_rows(plan, final)
    for i, teacher in enumerate(plan.config.active_teachers):
        if teacher.weights == "ema":
            models.export(plan.output_dir / f"final_{teacher.name}", average_of=i)


def _write_learned_rows(plan: Plan, exported: Path) -> None:
    """Write the rows that moved furthest in each learned projection to the run's directory.

    exported: folder of the exported student.
    """
    rows = {}
    for i, (teacher, planned) in enumerate(zip(plan.config.active_teachers, plan.teachers, strict=True)):
        if isinstance(teacher, OwnIdsTeacher) and teacher.projection_lr and planned.projection is not None:
            learned = ProjectionMatrix.load(exported / PROJECTIONS / f"{teacher.name}.safetensors")
            tokenizers = tokenizer_of(plan.config.student, key="student"), tokenizer_of(teacher, key=f"teachers.{i}")
            rows[teacher.name] = list(_moved_rows(planned.projection, learned, *tokenizers))
    if rows:
        write_projections(plan.output_dir, rows)


def _moved_rows(
    start: ProjectionMatrix,
    learned: ProjectionMatrix,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
) -> Iterator[MovedRow]:
    """Yield the rows whose weights moved furthest. Both matrices must have the same entries."""
    moved = np.abs(learned.weights - start.weights).sum(axis=1) / 2
    student, teacher = pieces_of(student_tokenizer), pieces_of(teacher_tokenizer)
    for i in np.argsort(-moved, kind="stable")[:_NUM_ROWS].tolist():
        entries_before, entries_after = (
            tuple((entry.token, entry.weight) for entry in entries_of(matrix, i, teacher_tokenizer, teacher))
            for matrix in (start, learned)
        )
        if moved[i] > 0:
            yield MovedRow(shown_token(student_tokenizer, student, i), float(moved[i]), entries_before, entries_after)


def export_best(
    plan: Plan, best: BestSteps, checkpoints: CheckpointManager, start: Mapping[str, float] | None = None
) -> Best | None:
    """Copy the student of the best existing checkpoint to best/ and return its step, or None without one.

    start: the student's figures before training, which a value of the same metric must be better than.
    """
    settings, saved_steps = plan.config.train.keep_best, set(checkpoints.steps())
    if settings is None:
        return None
    for step, value in best.ranked:
        is_worse = start is not None and settings.is_better(start.get(settings.metric, math.nan), value)
        if step in saved_steps and not is_worse:
            copy_whole(checkpoints.path(step) / STUDENT, plan.output_dir / "best")
            return Best(settings.metric, step, value)
    return None


def push_export(plan: Plan, settings: PushToHub) -> None:
    """Push the model that `settings` names. Raises HubError on failure."""
    folder = plan.output_dir / settings.model
    if not folder.is_dir():
        raise HubError(f"run.push_to_hub.model={settings.model}: the run has no {folder}, so nothing was pushed")
    with working(f"pushing {settings.model} to {settings.repo}"):
        url = push(folder, settings.repo, private=settings.private)
    print_line(f"pushed  {url}")


def write_cards(plan: Plan, closing: ClosingTable, start: Mapping[str, float], step: int) -> None:
    """Write README.md into final/, best/ and final_<teacher>/.

    closing: closing table of the student after `step`, the last. start: as for `closing_table`.
    """
    for exported in _exported_folders(plan, closing, start, step):
        write_card(plan.output_dir, exported)


def _exported_folders(plan: Plan, closing: ClosingTable, start: Mapping[str, float], step: int) -> Iterator[Exported]:
    config, folder, best = plan.config, plan.output_dir, closing.best
    if closing.is_exported:
        yield Exported(folder / "final", f"The student after {step:,} steps", step, closing)
    if best is not None:
        description = f"The student after {best.step:,} of {step:,} steps, at its best {best.metric}: {best.value:.4g}"
        at_best = closing_at(config, folder, start, best.step)
        yield Exported(folder / "best", description, best.step, at_best, " (best)")
    for teacher in config.active_teachers:
        if teacher.weights == "ema" and closing.is_exported:
            description = f"An average of the student's weights over {step:,} steps with decay {teacher.ema_decay:g}"
            yield Exported(folder / f"final_{teacher.name}", description, step, suffix=f" ({teacher.name})")


def provenance(plan: Plan, summary: RunSummary) -> Provenance:
    student = plan.config.student
    # With LoRA the run started from student.model and adapters.
    model = student.model if plan.started_from is None or student.lora is not None else plan.started_from
    return Provenance(
        command=without_secrets(_command()),
        versions={
            "python": platform.python_version(),
            "nemo-opd": package_version(),
            **{name: version(name) for name in _LIBRARIES},
        },
        student=ModelOrigin(
            "student",
            _public_name(model),
            _public_name(student.tokenizer_source[1]),
            plan.student_vocab_size,
            read_own_card(model),
            commit=hub_commit(model),
            parameters=plan.utilization.student.parameters,
        ),
        teachers=tuple(
            _teacher_origin(settings, teacher_summary, teacher.vocab_size, size)
            for settings, teacher_summary, teacher, size in zip(
                plan.config.active_teachers, summary.teachers, plan.teachers, plan.utilization.teachers, strict=True
            )
        ),
        started_from=plan.started_from,
        validation_texts=plan.data.validation_hash,
        data_commits=_data_commits(plan.config),
        total_steps=summary.total_steps,
        started=datetime.now().strftime("%Y-%m-%d %H:%M"),
        num_texts=len(plan.data.train) if isinstance(plan.data, Corpus) else None,
    )


def _data_commits(config: RunConfig) -> dict[str, str]:
    settings = {".".join(map(str, keys)): value for keys, value in leaves(config.model_dump())}
    hubs = [key.removesuffix(".path") for key, value in settings.items() if key.endswith(".hub.path") and value]
    commits = {hub: data_commit(settings[f"{hub}.path"], settings[f"{hub}.revision"]) for hub in hubs}
    return {hub: commit for hub, commit in commits.items() if commit is not None}


def _command() -> str:
    """Return the user's command line: `nemo-opd distil …`, or `python SCRIPT …`."""
    program, *arguments = sys.orig_argv[1:] or [""]  # without the interpreter; Hydra replaces sys.argv
    if program.endswith(".py") or program.startswith("-"):
        return shlex.join(["python", program, *arguments])
    return shlex.join([Path(program).name, *arguments])


def _teacher_origin(settings: Teacher, summary: TeacherSummary, vocab_size: int, size: ModelSize | None) -> ModelOrigin:
    model = summary.model if settings.cache is None else read_manifest(settings.cache).teacher
    return ModelOrigin(
        name=summary.name,
        model=_public_name(model),
        tokenizer=_public_name(settings.tokenizer_source[1]),
        vocab_size=vocab_size,
        # The name of a served teacher need not be one on the hub.
        card=OwnCard() if settings.served is not None else read_own_card(model),
        weight=summary.weight,
        loss=summary.loss,
        commit=None if settings.served is not None else hub_commit(model),
        audit=(*summary.coverage, *summary.warnings),
        parameters=None if size is None else size.parameters,
    )


def _public_name(reference: str) -> str:
    return short_name(without_secrets(reference))
