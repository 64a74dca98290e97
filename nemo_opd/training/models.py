"""The driver's interface to the worker groups of the student and its teachers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.aggregation import (
    apply_teacher_weights,
    build_objective,
    coverage_metrics,
    gap,
    joined_scores,
    leakage_metrics,
    share_metrics,
    weighted_by_confidence,
)
from nemo_opd.checkpoint.shards import require_whole_export
from nemo_opd.cluster.batch_grid import BatchGrid, dp_leader_ranks, reduced
from nemo_opd.cluster.group import Call, Cluster, Group, submit_sequentially
from nemo_opd.config.sampling_checks import confidence_alphas
from nemo_opd.evaluation.likelihoods import Scored
from nemo_opd.evaluation.validation import joined_losses, per_text, shared_bits_per_byte, teachers_bits_per_byte
from nemo_opd.files import replacing
from nemo_opd.handoff.outputs import Window, windows
from nemo_opd.handoff.shared_memory import FileDescriptor
from nemo_opd.preflight.plan import Plan
from nemo_opd.rollout.engine_interface import Completion, Request, Sampling
from nemo_opd.training.groups import (
    AnsweringModel,
    Links,
    ModelGroup,
    OwnTeacher,
    column_order,
    student_group,
    teacher_group,
)
from nemo_opd.types import NO_CHUNK, Batch, Closing, Mean, Metric, Metrics, SequenceScores, TeacherRows
from nemo_opd.workers.step import StudentStep
from nemo_opd.workers.teacher_worker import TeacherOutput

_RankWindows = tuple[Window, ...]


@dataclass(frozen=True, slots=True)
class InFlightBatch:
    """Global batch that the teachers are reading."""

    batch: Batch
    slot: int
    """Index of the buffer that each teacher writes."""
    calls: list[Call]
    """One call per teacher that reads ahead."""
    about: str
    """Description of the batch for messages."""


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """Global batch that the teachers have read."""

    batch: Batch
    """Batch with the teachers' weights for each sequence."""
    slot: int
    windows: list[_RankWindows]
    """Windows on every teacher's output, indexed by student rank."""
    seconds: tuple[float, ...]
    """Time of the slowest rank of each teacher."""
    positions: tuple[int, ...]
    """Positions that each teacher has read, padding included."""
    retried: dict[str, int]
    """Requests sent again, keyed by served teacher."""
    unanswered: dict[str, int]
    """Tokens without a log-probability, keyed by teacher; only teachers whose output is their likeliest tokens."""
    about: str


class Models(Closing):
    """Worker groups of the student and every active teacher, each in its own layout.

    Teacher output stays on the teachers' devices; only handles and metrics reach the driver. Teachers have one buffer
    for the batch that the student reads and one for each batch of lookahead. A teacher with the student's weights
    never reads ahead: it reads a batch when this is collected, after the update on the previous batch.
    """

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        """Load all models. Raises WorkerError or ClusterError."""
        self._cluster = cluster
        self._grid = plan.grid
        self._plan, self._names = plan, plan.config.active_names
        self._objective = build_objective(
            plan.config,
            [teacher.projection for teacher in plan.teachers],
            student_vocab_size=plan.student_vocab_size,
            teacher_vocab_sizes=[teacher.vocab_size for teacher in plan.teachers],
        )
        self._free_slots = deque(range(1 + plan.lookahead))
        orders = [column_order(plan, i) for i in range(len(plan.teachers))]
        self._columns = [None if order is None else torch.from_numpy(order).argsort() for order in orders]
        """int64 [W]: column of each of a teacher's tokens, or None if it is the id."""
        with ExitStack() as stack:
            # Closed in reverse: the student unmaps the teachers' buffers before they are freed.
            ahead = {
                i: stack.enter_context(teacher_group(cluster, plan, i, orders[i]))
                for i, settings in enumerate(plan.config.active_teachers)
                if not settings.is_student
            }
            self.student = stack.enter_context(student_group(cluster, plan, orders))
            cluster.gather([group.ready for group in (self.student, *ahead.values())])
            self.teachers: list[Group] = [
                ahead.get(i) or OwnTeacher(self.student, i, settings.name)
                for i, settings in enumerate(plan.config.active_teachers)
            ]
            self._ahead = tuple(ahead)
            self._in_student = tuple(i for i in range(len(self.teachers)) if i not in ahead)
            self._student = ModelGroup(self.student, plan.grid.student, plan.config.train.tokens_at_a_time)
            self._teachers = [
                ModelGroup(group, layout, budget)
                for group, layout, budget in zip(
                    self.teachers, plan.grid.teachers, plan.teacher_tokens_at_a_time, strict=True
                )
            ]
            self._links = Links(self.student, self.teachers, plan.deliveries)
            self._stack = stack.pop_all()

    def submit(self, batch: Batch, about: str) -> InFlightBatch:
        """Start the forward passes of the teachers that read ahead, in parallel on separate devices.

        about: description of the batch for messages.
        """
        slot, batch = self._free_slots.popleft(), self._grid.balanced(batch)
        calls = self._on_teachers("forward", batch, slot, about=about, only=self._ahead)
        return InFlightBatch(batch, slot, calls, about)

    def _on_teachers(
        self, method: str, batch: Batch, *more: object, about: str = "", only: Collection[int] | None = None
    ) -> list[Call]:
        """Call a method of every teacher (or of `only` these) with the tokens of each rank's rows and their cuts.

        Teachers on the same devices take turns. more: further arguments for every rank.
        """
        calls: list[tuple[Group, Callable[[], Call]]] = []
        for i, (group, layout) in enumerate(zip(self.teachers, self._grid.teachers, strict=True)):
            if only is not None and i not in only:
                continue
            by_rank = [part.teachers[i].tokens for part in self._grid.by_rank(batch, layout)]
            cuts_by_rank = self._teachers[i].micro_batches(by_rank)
            arguments = [(tokens, cuts, *more) for tokens, cuts in zip(by_rank, cuts_by_rank, strict=True)]
            calls.append((group, partial(group.submit, method, arguments, about=about)))
        return submit_sequentially(calls)

    def collect(self, in_flight: InFlightBatch) -> ScoredBatch:
        """Wait for the teachers, set their weights for each sequence and locate their output for the student."""
        by_teacher = self._outputs(in_flight)
        as_read = self._grid.padded(in_flight.batch)
        scores = self._scores(by_teacher, in_flight.batch)
        batch, unanswered = only_answered(in_flight.batch, by_teacher, self._grid)
        available_scores = [teacher_scores for teacher_scores in scores if teacher_scores is not None]
        config = self._plan.config
        priors = [teacher.weight for teacher in config.active_teachers]
        batch = apply_teacher_weights(config.aggregation, batch, available_scores, priors=priors)
        batch = weighted_by_confidence(batch, scores, confidence_alphas(config))
        by_teacher_and_reader = [
            windows([output.handle for output in by_rank], delivery.sides, rows.tokens.packed_lengths)
            for by_rank, delivery, rows in zip(by_teacher, self._plan.deliveries, as_read.teachers, strict=True)
        ]
        self._links.transfer(by_teacher_and_reader, in_flight.about)
        by_student_rank = list(zip(*by_teacher_and_reader, strict=True)) or [()] * self._grid.student.size
        seconds = tuple(max(output.seconds for output in by_rank) for by_rank in by_teacher)
        positions = tuple(
            sum(by_rank[rank].positions for rank in dp_leader_ranks(layout))
            for by_rank, layout in zip(by_teacher, self._grid.teachers, strict=True)
        )
        return ScoredBatch(
            batch,
            in_flight.slot,
            windows=by_student_rank,
            seconds=seconds,
            positions=positions,
            retried={
                name: sum(output.retried or 0 for output in by_rank)
                for name, by_rank in zip(self._names, by_teacher, strict=True)
                if by_rank[0].retried is not None
            },
            unanswered={
                name: number for name, number in zip(self._names, unanswered, strict=True) if number is not None
            },
            about=in_flight.about,
        )

    def _outputs(self, in_flight: InFlightBatch) -> list[list[TeacherOutput]]:
        """Return each teacher's output by rank; teachers with the student's weights read the batch only now."""
        outputs = dict(zip(self._ahead, self._cluster.gather(in_flight.calls), strict=True))
        calls = self._on_teachers("forward", in_flight.batch, about=in_flight.about, only=self._in_student)
        outputs |= zip(self._in_student, self._cluster.gather(calls), strict=True)
        return [outputs[i] for i in range(len(self.teachers))]

    def _scores(self, by_teacher: Sequence[Sequence[TeacherOutput]], batch: Batch) -> list[SequenceScores | None]:
        """Return each teacher's scores for the batch's sequences, or None if it has no scores."""
        scores: list[SequenceScores | None] = []
        for by_rank, layout in zip(by_teacher, self._grid.teachers, strict=True):
            parts = [part for rank in dp_leader_ranks(layout) if (part := by_rank[rank].scores) is not None]
            scores.append(joined_scores(parts, self._grid.is_given(batch)) if parts else None)
        return scores

    def train_step(self, scored: ScoredBatch, kd_scale: float, *, compare_gradients: bool = False) -> dict[str, Metric]:
        """Make the student's optimizer step and return the metrics of the global batch."""
        normalizers = self._objective.normalizers(scored.batch)
        steps = [
            (StudentStep(part, rank_windows, normalizers, cuts, kd_scale, compare_gradients),)
            for part, rank_windows, cuts in self._student_parts(scored)
        ]
        return self._reduced(self._call_student("train_step", steps, scored), scored)

    def evaluate(self, batch: Batch) -> dict[str, Metric]:
        """Return the metrics of a global batch without an update. Other batches may be in flight."""
        scored = self.collect(self.submit(batch, "validation"))
        by_rank = self._call_student("evaluate", self._student_parts(scored), scored)
        losses = joined_losses([by_rank[rank][1] for rank in dp_leader_ranks(self._grid.student)])
        losses = self._grid.unpad(losses, scored.batch)
        metrics = self._reduced([metrics for metrics, _ in by_rank], scored)
        metrics |= per_text(scored.batch, losses.nats) | shared_bits_per_byte(scored.batch, losses.nats)
        if self._plan.token_groups is None:
            return metrics
        return metrics | self._plan.token_groups.of_student(scored.batch, losses)

    def _student_parts(self, scored: ScoredBatch) -> list[tuple[Batch, _RankWindows, tuple[slice, ...]]]:
        """Return the rows, windows and microbatches of each student rank."""
        # Ids of teachers' tokens become columns of their logits.
        teachers = (
            rows if column is None else replace(rows, tokens=replace(rows.tokens, ids=column[rows.tokens.ids]))
            for rows, column in zip(scored.batch.teachers, self._columns, strict=True)
        )
        parts = self._grid.by_rank(replace(scored.batch, teachers=tuple(teachers)), self._grid.student)
        cuts = self._student.micro_batches([part.student for part in parts])
        return list(zip(parts, scored.windows, cuts, strict=True))

    def _call_student(self, method: str, arguments: Sequence[tuple[Any, ...]], scored: ScoredBatch) -> list[Any]:
        """Call a student method that reads the teachers' output, then free the slot of their buffers."""
        by_rank = self.student.call(method, arguments, about=scored.about)
        self._free_slots.append(scored.slot)
        return by_rank

    def _reduced(self, by_rank: Sequence[Metrics], scored: ScoredBatch) -> dict[str, Metric]:
        """Return the metrics of the global batch."""
        metrics = reduced(by_rank, self._grid.student)
        shared = share_metrics(self._objective, scored.batch) | leakage_metrics(scored.batch, self._names)
        return metrics | shared | coverage_metrics(self._objective, scored.batch, self._names)

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Completion]:
        """Return the student's continuation of each prompt, in order; data-parallel ranks divide the prompts."""
        about = f"rollouts of step {version + 1}"
        return self._student.continued(requests, sampling, version, self._plan.sampled_at_once, about=about)

    def answering_teacher(self, i: int, end_ids: Collection[int]) -> AnsweringModel:
        """Return a teacher that continues prompts, both in its tokens. end_ids: tokens that end a sequence."""
        return AnsweringModel(self._teachers[i], end_ids, self._plan.answered_at_once[i])

    def continue_greedily(self, prompts: Sequence[NDArray[np.int32]], num_new: int) -> list[list[int]]:
        """Return the student's `num_new` likeliest tokens after each prompt, one after another."""
        return self._student.continue_greedily(prompts, num_new)

    def likelihoods(self, rows: Sequence[Scored], teacher: int | None = None) -> list[tuple[float, bool]]:
        """Return the student's or a teacher's likelihoods of sequences (see `Scorer`)."""
        return (self._student if teacher is None else self._teachers[teacher]).likelihoods(rows)

    def evaluate_teachers(self, batch: Batch) -> dict[str, Metric]:
        """Return `shared_bits_per_byte/<teacher>` of a global batch, and its values for the groups of tokens."""
        nats: list[Tensor] = []
        by_teacher = self._cluster.gather(self._on_teachers("token_nats", batch))
        for by_rank, layout, rows in zip(by_teacher, self._grid.teachers, batch.teachers, strict=True):
            parts = [by_rank[rank] for rank in dp_leader_ranks(layout)]
            nats.append(self._grid.joined(parts, batch, rows.tokens.ids.shape[1], fill=0.0))
        bits = teachers_bits_per_byte(batch, nats, self._names)
        return bits if self._plan.token_groups is None else bits | self._plan.token_groups.of_teachers(batch, nats)

    def privilege_gaps(self, batch: Batch, teachers: Sequence[int]) -> dict[str, Mean]:
        """Return `privilege_gap/<teacher>`, and `contrast_gap/<teacher>` with `context.contrast` (methods.md §13).

        teachers: indices, ascending, of teachers with a context that measure the gap in this batch.
        """
        with_context = self._log_probabilities(batch, teachers)
        without = self._log_probabilities(_variant(batch, 0), teachers)
        gaps = {f"privilege_gap/{self._names[i]}": gap(with_context[i], without[i]) for i in teachers}
        if contrasting := [i for i in teachers if len(batch.teachers[i].variants) > 1]:
            contrast = self._log_probabilities(_variant(batch, 1), contrasting)
            gaps |= {f"contrast_gap/{self._names[i]}": gap(contrast[i], without[i]) for i in contrasting}
        return gaps

    def _log_probabilities(self, batch: Batch, teachers: Sequence[int]) -> dict[int, SequenceScores]:
        """Return the log-probabilities of the responses, keyed by index of the teacher."""
        by_teacher = self._cluster.gather(self._on_teachers("log_probability", batch, only=teachers))
        is_given = self._grid.is_given(batch)
        return {
            i: joined_scores([by_rank[rank] for rank in dp_leader_ranks(self._grid.teachers[i])], is_given)
            for i, by_rank in zip(teachers, by_teacher, strict=True)
        }

    def save(self, folder: Path, in_background: bool = False) -> None:
        """Write a checkpoint's files. in_background: as for `StudentWorker.save`."""
        self._on_each_student("save", folder.resolve(), in_background)

    def is_saved(self) -> bool:
        """Return whether a write in the background has ended on all ranks, with or without an error."""
        return all(self.student.call("background.is_done"))

    def end_save(self) -> None:
        """Wait for a write in the background. Raises its error."""
        self.student.call("background.end")

    def load(self, folder: Path) -> None:
        self._on_each_student("load", folder.resolve())

    def export(self, folder: Path, served_as: str | None = None, average_of: int | None = None) -> None:
        """Replace a Hugging Face folder by the student atomically. Raises CheckpointError if it is incomplete.

        served_as: dtype for a rollout server; None exports the form for users. average_of: index of an EMA teacher
        whose average is exported instead of the student's weights.
        """
        with replacing(folder) as temporary:
            self._on_each_student("export", temporary.resolve(), served_as, average_of)
            require_whole_export(temporary)

    def _on_each_student(self, method: str, *arguments: object) -> list[Any]:
        """Call a method on every student rank with the same arguments."""
        return self.student.call(method, [arguments] * self._grid.student.size)

    @contextmanager
    def held_weights(self, served_as: str) -> Iterator[FileDescriptor]:
        """Hold the exported weights in shared memory of the student's first process; yield their file descriptor."""
        by_rank = self._on_each_student("hold_weights", served_as)
        try:
            yield by_rank[0]
        finally:
            self.student.call("exports.release")

    def close(self) -> None:
        self._stack.close()


def only_answered(
    batch: Batch, by_teacher: Sequence[Sequence[TeacherOutput]], grid: BatchGrid
) -> tuple[Batch, list[int | None]]:
    """Remove unanswered targets from the batch; also return each teacher's number of unanswered tokens.

    by_teacher: output of each teacher, indexed by rank, for the padded batch. A target is a token or an aligned chunk,
    which needs all of its tokens. The number is None for a teacher that answers every token by construction. Call
    before units are counted, so that texts without compared units do not count.
    """
    teachers = list(batch.teachers)
    numbers: list[int | None] = []
    for i, (by_rank, layout) in enumerate(zip(by_teacher, grid.teachers, strict=True)):
        parts = [by_rank[rank].is_answered for rank in dp_leader_ranks(layout)]
        answered = [part for part in parts if part is not None]
        width = batch.teachers[i].tokens.ids.shape[1]
        is_answered = grid.joined(answered, batch, width, fill=True) if answered else None
        numbers.append(None if is_answered is None else int((~is_answered).sum()))
        if is_answered is not None and not is_answered.all():
            teachers[i] = _drop_unanswered(batch.teachers[i], is_answered)
    return replace(batch, teachers=tuple(teachers)), numbers


def _drop_unanswered(rows: TeacherRows, is_answered: Tensor) -> TeacherRows:
    """Return a teacher's rows without unanswered targets. is_answered: bool [B, T]."""
    if rows.chunks is not None:
        # Per sequence, as each numbers its chunks from 0.
        lost = [chunks[~answered] for chunks, answered in zip(rows.chunks.teacher, is_answered, strict=True)]
        student, teacher = (_drop_chunks(side, lost) for side in (rows.chunks.student, rows.chunks.teacher))
        return replace(rows, chunks=replace(rows.chunks, student=student, teacher=teacher))
    if rows.moved is not None:
        width = rows.moved.loss_mask.shape[1]
        places = (torch.arange(width) + rows.moved.by.unsqueeze(1)).clamp(0, is_answered.shape[1] - 1)
        mask = rows.moved.loss_mask & is_answered.gather(1, places)
        return replace(rows, moved=replace(rows.moved, loss_mask=mask))
    return replace(rows, tokens=replace(rows.tokens, loss_mask=rows.tokens.loss_mask & is_answered))


def _drop_chunks(chunk_ids: Tensor, lost: Sequence[Tensor]) -> Tensor:
    """Return chunk ids [B, S] with NO_CHUNK for those in `lost`, one tensor of ids per sequence."""
    is_lost = torch.stack([torch.isin(ids, lost_ids) for ids, lost_ids in zip(chunk_ids, lost, strict=True)])
    return chunk_ids.masked_fill(is_lost, NO_CHUNK)


def _variant(batch: Batch, k: int) -> Batch:
    """Return the batch with each teacher's prompt variant k, if it has one (0: no context, 1: another record's)."""
    teachers = (
        replace(rows, tokens=rows.variants[k], chunks=None, moved=None) if k < len(rows.variants) else rows
        for rows in batch.teachers
    )
    return replace(batch, teachers=tuple(teachers))
