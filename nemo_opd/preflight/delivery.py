"""Delivery of teacher output: the student ranks that read each teacher rank, and traffic between nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nemo_opd.cluster.placement import Placement
from nemo_opd.config.run import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ConfigError
from nemo_opd.handoff.slices import (
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
