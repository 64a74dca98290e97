"""Delivery of teacher output: the student ranks that read each teacher rank, and traffic between nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nemo_opd.cluster.base import Group
from nemo_opd.cluster.placement import Placement
from nemo_opd.config.run import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ConfigError
from nemo_opd.handoff.link import ExchangePlanner, Rendezvous
from nemo_opd.handoff.outputs import Window
from nemo_opd.handoff.plan import (
    LayoutPair,
    Payload,
    Readers,
    Traffic,
    check_stays_on_node,
    planned_readers,
    planned_traffic,
)
from nemo_opd.handoff.transport import choose_transport, probe_transport
from nemo_opd.preflight.model_info import ModelInfo
from nemo_opd.preflight.teachers import output_columns
from nemo_opd.progress import working


@dataclass(frozen=True, slots=True)
class Delivery:
    """Transfer of output from a teacher's ranks to the student's ranks."""

    sides: LayoutPair
    readers: tuple[Readers, ...]
    """Readers of each teacher rank."""
    traffic: tuple[Traffic, ...]
    """Traffic that each student rank receives from other nodes."""
    is_inside: bool = False
    """Whether each teacher rank runs in the process of the student rank with the same number."""

    @property
    def crosses_nodes(self) -> bool:
        return any(self.traffic)


def settle_transport(config: RunConfig, device: str, deliveries: Sequence[Delivery]) -> tuple[str, list[str]]:
    """Choose the transport, probing this machine's GPUs; also return a warning if it is not the fastest.

    Raises ConfigError if the configured transport cannot be used.
    """
    pairs = mapped_devices(deliveries, shares_process=config.cluster.launcher == "local")

    def probe() -> str | None:
        # Workers on other machines check their own GPUs and report a failure.
        local_pairs = [pair for pair in pairs if max(pair) < torch.cuda.device_count()]
        if not local_pairs:
            return None
        with working("trying to read another process's GPU memory"):
            return probe_transport("cuda_ipc", local_pairs)

    return choose_transport(config.handoff, device, probe)


def mapped_devices(deliveries: Sequence[Delivery], *, shares_process: bool) -> list[tuple[int, int]]:
    """Return pairs of a node's devices such that a process on the second maps a buffer that another has on the first.

    shares_process: ranks with the same number share a process, even if the teacher runs separately from the student.
    """
    pairs = set()
    for delivery in deliveries:
        sides, is_inside = delivery.sides, shares_process or delivery.is_inside
        for rank, readers in enumerate(delivery.readers):
            for reader in {*readers.output, *readers.head}:
                if not (is_inside and reader == rank):
                    pairs.add((sides.teacher_places[rank].device, sides.student_places[reader].device))
    return sorted(pairs)


def check_deliveries(
    config: RunConfig,
    placement: Placement,
    layouts: tuple[Layout, Sequence[Layout]],
    teachers: Sequence[ModelInfo],
    device: str,
) -> None:
    """Raise ConfigError if logits, or any output of a self-teacher, would have to cross nodes.

    layouts: the student's and the teachers'. Called before the data are read, so teacher lengths equal the student's.
    """
    lengths = [config.train.max_length] * len(teachers)
    for i, (name, sides, payload) in enumerate(_transfers(config, placement, layouts, teachers, lengths, device)):
        check_stays_on_node(name, sides, payload)
        settings = config.active_teachers[i]
        if settings.is_student and any(planned_traffic(sides, payload)):
            raise ConfigError(
                f"teachers.{i}.weights={settings.weights}: the student's tensor-parallel ranks span several nodes, so "
                "the head would have to be sent between them at every step; lower student.parallelism.tp to a divisor "
                "of a node's GPUs, or name a model for this teacher"
            )


def plan_deliveries(
    config: RunConfig,
    placement: Placement,
    layouts: tuple[Layout, Sequence[Layout]],
    teachers: Sequence[ModelInfo],
    device: str,
    *,
    lengths: Sequence[int],
) -> tuple[Delivery, ...]:
    """Plan the delivery of each active teacher.

    layouts: the student's and the teachers'. lengths: tokens of each teacher's longest sequence.
    """
    return tuple(
        Delivery(sides, planned_readers(sides, payload), planned_traffic(sides, payload), i in placement.inside)
        for i, (_, sides, payload) in enumerate(_transfers(config, placement, layouts, teachers, lengths, device))
    )


def arriving_bytes(deliveries: Sequence[Delivery], buffers: int) -> int:
    """Return the maximum bytes that a student rank holds of output from other nodes.

    buffers: number of batches held per teacher.
    """
    by_rank = zip(*(delivery.traffic for delivery in deliveries), strict=True)
    return max((sum(buffers * part.output + part.head for part in traffic) for traffic in by_rank), default=0)


def _transfers(
    config: RunConfig,
    placement: Placement,
    layouts: tuple[Layout, Sequence[Layout]],
    teachers: Sequence[ModelInfo],
    lengths: Sequence[int],
    device: str,
) -> Iterator[tuple[str, LayoutPair, Payload]]:
    """Yield each active teacher's name, the layouts and places of both groups, and a batch's largest output."""
    student, teacher_layouts = layouts
    for i, (settings, teacher) in enumerate(zip(config.active_teachers, teachers, strict=True)):
        columns, itemsize = output_columns(config, settings, teacher.size, device)
        payload = Payload(
            num_sequences=config.train.global_batch_size,
            length=lengths[i],
            vocab_size=teacher.vocab_size,
            hidden_size=columns,
            itemsize=itemsize,
        )
        yield settings.name, LayoutPair(student, teacher_layouts[i], placement.student, placement.teachers[i]), payload


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
        rendezvous = [
            None if planner is None else self._rendezvous(group)
            for planner, group in zip(self._planners, self._teachers, strict=True)
        ]
        calls = [self._student.submit("join_links", [(rendezvous,)] * self._student.size)]
        for group, meeting in zip(self._teachers, rendezvous, strict=True):
            if meeting is not None:
                calls.append(group.submit("join_link", [(meeting,)] * group.size))
        self._student.cluster.gather(calls)

    def _rendezvous(self, teacher: Group) -> Rendezvous:
        return Rendezvous(*teacher.address(), self._student.size, teacher.size, self._student.cluster.timeout_s)

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
