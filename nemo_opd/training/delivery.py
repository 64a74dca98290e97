"""Which rank of the student reads from which rank of a teacher, and what is sent between nodes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_opd.cluster.placement import Placement
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.distributed.layout import Layout
from nemo_opd.handoff.plan import Readers, Sides
from nemo_opd.handoff.traffic import Payload, Traffic, check_stays_on_node, planned_readers, planned_traffic
from nemo_opd.training.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class Delivery:
    """The transfer of output from the ranks of a teacher to the ranks of the student."""

    sides: Sides
    readers: tuple[Readers, ...]
    """Readers of each rank of the teacher."""
    traffic: tuple[Traffic, ...]
    """Amount that each rank of the student receives from other nodes."""

    @property
    def crosses_nodes(self) -> bool:
        return any(self.traffic)


def check_deliveries(
    config: RunConfig,
    transport: str,
    placement: Placement,
    layouts: tuple[Layout, Sequence[Layout]],
    teachers: Sequence[ModelInfo],
) -> None:
    """Raise ConfigError where logits would have to be sent to another node.

    layouts: the student's and the teachers'. Called before the data are read, so lengths count as the student's.
    """
    for i, (settings, teacher) in enumerate(zip(config.active_teachers, teachers, strict=True)):
        payload = _payload_of(config, settings, teacher, config.train.max_length)
        check_stays_on_node(transport, settings.name, _sides_of(i, placement, layouts), payload)


def plan_deliveries(
    config: RunConfig,
    placement: Placement,
    layouts: tuple[Layout, Sequence[Layout]],
    teachers: Sequence[ModelInfo],
    *,
    lengths: Sequence[int],
) -> tuple[Delivery, ...]:
    """Plan the delivery of each active teacher.

    layouts: the student's and the teachers'. lengths: tokens of each teacher's longest sequence.
    """
    deliveries = []
    for i, (settings, teacher) in enumerate(zip(config.active_teachers, teachers, strict=True)):
        sides, payload = _sides_of(i, placement, layouts), _payload_of(config, settings, teacher, lengths[i])
        deliveries.append(Delivery(sides, planned_readers(sides, payload), planned_traffic(sides, payload)))
    return tuple(deliveries)


def _sides_of(i: int, placement: Placement, layouts: tuple[Layout, Sequence[Layout]]) -> Sides:
    student, teachers = layouts
    return Sides(student, teachers[i], placement.student, placement.teachers[i])


def arriving_bytes(deliveries: Sequence[Delivery], buffers: int) -> int:
    """Return the bytes that a rank of the student keeps at most of output from other nodes.

    buffers: number of batches kept of each teacher.
    """
    by_rank = zip(*(delivery.traffic for delivery in deliveries), strict=True)
    return max((sum(buffers * each.output + each.head for each in own) for own in by_rank), default=0)


def _payload_of(config: RunConfig, settings: Teacher, teacher: ModelInfo, length: int) -> Payload:
    return Payload(
        num_rows=config.train.global_batch_size,
        length=length,
        vocab_size=teacher.vocab_size,
        hidden_size=teacher.size.hidden_size if config.handoff.type == "hidden_states" else None,
        itemsize=getattr(torch, settings.dtype).itemsize,
    )
