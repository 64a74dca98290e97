"""Worker groups of a run's models: how they start, how texts are divided over them, and links between nodes."""

from collections.abc import Collection, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_opd.cluster.batch_grid import dp_leader_ranks, micro_batches, shared_out
from nemo_opd.cluster.group import Call, Cluster, Group
from nemo_opd.config.cluster import LogitsHandoff
from nemo_opd.config.sampling_checks import confidence_alphas
from nemo_opd.config.teacher import CrossTokenizerTeacher
from nemo_opd.distributed.layout import Layout
from nemo_opd.evaluation.likelihoods import Scored, answers, batches, token_rows
from nemo_opd.handoff.link import ExchangePlanner, Rendezvous
from nemo_opd.handoff.outputs import Window
from nemo_opd.preflight.delivery import Delivery
from nemo_opd.preflight.plan import Plan
from nemo_opd.progress import working
from nemo_opd.projection.matrix import order_by_student, with_columns
from nemo_opd.rollout.engine_interface import BatchLimit, Completion, Generator, Request, Sampling
from nemo_opd.rotary import RotaryLimit
from nemo_opd.teacher_cache.shard import read_manifest
from nemo_opd.types import TokenRows
from nemo_opd.workers.student_worker import StudentWorker
from nemo_opd.workers.teacher_worker import CachedTeacherWorker, ServedTeacherWorker, TeacherWorker


def column_order(plan: Plan, i: int) -> NDArray[np.int64] | None:
    """Return the tokens of the columns in which the student reads a teacher's logits, or None if these are the ids."""
    config, teacher = plan.config, plan.teachers[i]
    settings = config.active_teachers[i]
    if isinstance(config.handoff, LogitsHandoff) or config.handoff.column_order == "teacher":
        return None
    if not isinstance(settings, CrossTokenizerTeacher) or settings.projection_lr is not None:
        return None
    is_sparse = settings.cache is not None and read_manifest(settings.cache).form == "top_k"
    # A user's function may read ids.
    is_by_id = settings.served is not None or is_sparse or config.term(i).type == "function"
    if is_by_id or plan.teacher_layouts[i].tp > 1:
        return None
    assert teacher.projection is not None
    return order_by_student(teacher.projection, teacher.vocab_size)


def teacher_group(cluster: Cluster, plan: Plan, i: int, order: NDArray[np.int64] | None) -> Group:
    """Start the group of a teacher in separate processes. order: its `column_order`."""
    settings = plan.config.active_teachers[i]
    worker: type[TeacherWorker] = TeacherWorker
    if not settings.is_computed:
        worker = ServedTeacherWorker if settings.cache is None else CachedTeacherWorker
    arguments = {**_teacher_arguments(plan, i), "column_order": order}
    return cluster.group(f"teacher {settings.name}", worker, arguments, plan.placement.teachers[i])


def student_group(cluster: Cluster, plan: Plan, orders: Sequence[NDArray[np.int64] | None]) -> Group:
    """Start the student's group. Its batches have columns in place of teachers' ids. orders: `column_order` of each."""
    projections = [
        teacher.projection if teacher.projection is None or order is None else with_columns(teacher.projection, order)
        for teacher, order in zip(plan.teachers, orders, strict=True)
    ]
    return cluster.group(
        "student",
        StudentWorker,
        {
            "config": plan.config,
            "projections": projections,
            "total_steps": plan.total_steps,
            "vocab_size": plan.student_vocab_size,
            "teacher_vocab_sizes": [teacher.vocab_size for teacher in plan.teachers],
            "device": plan.device,
            "transport": plan.transport,
            "block_bytes": plan.memory.block_bytes,
            "empties_cache": plan.empties_cache,
            "end_ids": plan.sampled_end_ids,
            "own_teachers": {
                i: _teacher_arguments(plan, i)
                for i, settings in enumerate(plan.config.active_teachers)
                if settings.is_student
            },
        },
        plan.placement.student,
    )


def _teacher_arguments(plan: Plan, i: int) -> dict[str, Any]:
    settings = plan.config.active_teachers[i]
    alpha = confidence_alphas(plan.config)[i]
    return {
        "settings": settings,
        "key": "student.model" if settings.is_student else f"teachers.{i}.model",
        "vocab_size": plan.teachers[i].vocab_size,
        "device": plan.device,
        "transport": plan.transport,
        "handoff": plan.config.handoff.type,
        "score": plan.config.aggregation.score if alpha is None else "log_probability",
        "readers": plan.deliveries[i].readers,
        "num_slots": 1 if settings.is_student else 1 + plan.lookahead,
        "empties_cache": plan.empties_cache,
        "shares_process": settings.is_student or plan.config.cluster.launcher == "local",
    }


_MICRO_BATCHES_A_CALL = 16
"""Microbatches per rank in one call of a benchmark."""


class ModelGroup:
    """Group of workers that scores and continues texts, divided over its data-parallel ranks."""

    def __init__(self, group: Group, layout: Layout, budget: int) -> None:
        """budget: tokens of a microbatch on one rank."""
        self._group, self._layout, self._budget = group, layout, budget
        forms: list[tuple[bool, RotaryLimit | None]] = group.call("reading_form")
        self._is_packed, self._rotary = all(is_packed for is_packed, _ in forms), forms[0][1]

    def micro_batches(self, by_rank: Sequence[TokenRows]) -> list[tuple[slice, ...]]:
        """Cut each rank's sequences into microbatches."""
        lengths = [tokens.lengths.tolist() for tokens in by_rank]
        cuts_by_rank = micro_batches(lengths, self._budget, is_packed=self._is_packed, rotary=self._rotary)
        return [tuple(cuts) for cuts in cuts_by_rank]

    def likelihoods(self, rows: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Return the likelihoods of sequences, in order (see `Scorer`)."""
        layout, results = self._layout, [(0.0, False)] * len(rows)
        with working("reading benchmarks", len(rows), "sequences") as work:
            for indices, by_dp in batches(rows, layout.dp, self._budget * _MICRO_BATCHES_A_CALL):
                by_rank = [token_rows(by_dp[layout.coordinates(rank)[0]]) for rank in range(layout.size)]
                arguments = list(zip(by_rank, self.micro_batches(by_rank), strict=True))
                answered = self._group.call("likelihoods", arguments, about="benchmarks")
                # `batches` deals sequences to ranks round-robin.
                in_order = torch.stack([answered[rank] for rank in dp_leader_ranks(layout)], dim=1).flatten(0, 1)
                for i, answer in zip(indices, answers(in_order), strict=False):  # further rows are padding
                    results[i] = answer
                work.advance(len(indices))
        return results

    def continue_greedily(self, prompts: Sequence[NDArray[np.int32]], num_new: int) -> list[list[int]]:
        """Return the `num_new` likeliest tokens after each prompt, one after another. All ranks read all prompts."""
        filler = np.zeros(num_new, np.int32)
        rows = token_rows([Scored(np.concatenate([prompt, filler]), num_new) for prompt in prompts])
        arguments = [(rows, cuts) for cuts in self.micro_batches([rows] * self._layout.size)]
        by_rank: list[torch.Tensor] = self._group.call("continue_greedily", arguments, about="continuing texts")
        return cast(list[list[int]], by_rank[0].tolist())

    def continued(self, requests: Sequence[Request], *more: object, about: str) -> list[Completion]:
        """Return the completions of requests, in order. more: further arguments of `generate` on every rank."""
        arguments: list[tuple[Any, ...]] = [(part, *more) for part in shared_out(requests, self._layout)]
        by_rank: list[list[Completion]] = self._group.call("generate", arguments, about=about)
        return [completion for rank in dp_leader_ranks(self._layout) for completion in by_rank[rank]]


class AnsweringModel(Generator):
    """A model that answers questions on the workers of its group."""

    def __init__(self, group: ModelGroup, end_ids: Collection[int], limit: BatchLimit) -> None:
        """Store the arguments. end_ids: tokens that end a sequence. limit: batch size limit of a rank's sampling."""
        self._group, self._end_ids, self._limit = group, end_ids, limit

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return self._group.continued(requests, sampling, self._end_ids, self._limit, about="questions")

    def likelihoods(self, rows: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Return the sequences' likelihoods, in order (see `Scorer`)."""
        return self._group.likelihoods(rows)


class OwnTeacher(Group):
    """Group whose workers live inside the student's workers, which also end them."""

    def __init__(self, student: Group, teacher: int, name: str) -> None:
        """teacher: index among the active teachers. name: the teacher's name for messages."""
        super().__init__(student.cluster, f"teacher {name}", student.places)
        self._student, self._teacher, self.ready = student, teacher, student.ready

    def submit(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, about: str = "") -> Call:
        by_rank = [()] * self.size if arguments is None else arguments
        forwarded = [(self._teacher, method, rank_arguments) for rank_arguments in by_rank]
        return self._student.submit("own_teachers.call", forwarded, about=about)

    def address(self) -> tuple[str, int]:
        return self._student.address()

    def close(self) -> None:
        """Do nothing: the student's workers release the teacher."""


class Links:
    """Links between the student and each teacher whose output crosses nodes.

    Sends and receives are submitted and gathered together while neither group computes. So a dead rank is reported by
    its own group, and no send waits for a receive further back in a queue.
    """

    def __init__(self, student: Group, teachers: Sequence[Group], deliveries: Sequence[Delivery]) -> None:
        """Join the links; all groups must be ready. Raises WorkerError or ClusterError."""
        self._student, self._teachers = student, teachers
        self._planners = [
            ExchangePlanner(group.size) if delivery.crosses_nodes else None
            for group, delivery in zip(teachers, deliveries, strict=True)
        ]
        if any(self._planners):
            self._join()

    def _join(self) -> None:
        size, timeout_s = self._student.size, self._student.cluster.timeout_s
        rendezvous = [
            None if planner is None else Rendezvous(*group.address(), size, group.size, timeout_s)
            for planner, group in zip(self._planners, self._teachers, strict=True)
        ]
        calls = [self._student.submit("links.join", [(rendezvous,)] * size)]
        for group, meeting in zip(self._teachers, rendezvous, strict=True):
            if meeting is not None:
                calls.append(group.submit("join_link", [(meeting,)] * group.size))
        self._student.cluster.gather(calls)

    def transfer(self, by_teacher: Sequence[Sequence[Window]], about: str) -> None:
        """Send the student the rows that these windows read from other nodes, and wait.

        by_teacher: windows of each teacher, one per student rank. about: the batch, for messages. Raises WorkerError or
        ClusterError.
        """
        exchanges = [
            None if planner is None else planner.plan(windows)
            for planner, windows in zip(self._planners, by_teacher, strict=True)
        ]
        if all(exchange is None or exchange.is_empty for exchange in exchanges):
            return
        receives = [
            (tuple(() if exchange is None else exchange.receives[rank] for exchange in exchanges),)
            for rank in range(self._student.size)
        ]
        calls = [self._student.submit("receive", receives, about=about)]
        for group, exchange in zip(self._teachers, exchanges, strict=True):
            if exchange is not None:
                calls.append(group.submit("send", [(messages,) for messages in exchange.sends], about=about))
        self._student.cluster.gather(calls)
