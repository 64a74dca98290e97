"""How the ranks of each model are arranged, and who of the student reads from whom of a teacher."""

from collections.abc import Sequence

import torch

from nemo_opd.cluster.placement import Placement
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.distributed.layout import Layout
from nemo_opd.handoff.plan import Sides
from nemo_opd.handoff.traffic import Payload, check_stays_on_node, planned_readers, planned_traffic
from nemo_opd.training.layout import resolve_layout
from nemo_opd.training.plan import Delivery
from nemo_opd.training.side import Side


def resolve_layouts(config: RunConfig, placement: Placement) -> tuple[Layout, tuple[Layout, ...]]:
    """Of the student and of every active teacher. Raises ConfigError where tp · cp does not divide a model's ranks."""
    models = {"student": config.student, **{f"teachers.{i}": each for i, each in enumerate(config.active_teachers)}}
    student, *teachers = (
        resolve_layout(key, len(places), tp=model.parallelism.tp, cp=model.parallelism.cp)
        for (key, model), places in zip(models.items(), placement.groups, strict=True)
    )
    return student, tuple(teachers)


def check_deliveries(
    config: RunConfig,
    transport: str,
    placement: Placement,
    layouts: tuple[Layout, Sequence[Layout]],
    teachers: Sequence[Side],
) -> None:
    """Raises ConfigError where logits would have to be sent to a rank of the student on another node.

    layouts: the student's and the teachers'. Before the data are read, so sequences count as long as the student's.
    """
    for i, (settings, teacher) in enumerate(zip(config.active_teachers, teachers, strict=True)):
        payload = payload_of(config, settings, teacher, config.train.max_length)
        check_stays_on_node(transport, settings.name, sides_of(i, placement, layouts), payload)


def plan_deliveries(
    config: RunConfig,
    placement: Placement,
    layouts: tuple[Layout, Sequence[Layout]],
    teachers: Sequence[Side],
    *,
    lengths: Sequence[int],
) -> tuple[Delivery, ...]:
    """Of each active teacher, whose longest sequence has `lengths` tokens; layouts: the student's and the teachers'."""
    deliveries = []
    for i, (settings, teacher) in enumerate(zip(config.active_teachers, teachers, strict=True)):
        sides, payload = sides_of(i, placement, layouts), payload_of(config, settings, teacher, lengths[i])
        deliveries.append(Delivery(sides, planned_readers(sides, payload), planned_traffic(sides, payload)))
    return tuple(deliveries)


def sides_of(i: int, placement: Placement, layouts: tuple[Layout, Sequence[Layout]]) -> Sides:
    student, teachers = layouts
    return Sides(student, teachers[i], placement.student, placement.teachers[i])


def arriving_bytes(deliveries: Sequence[Delivery], buffers: int) -> int:
    """The most that a rank of the student keeps of what teachers on other nodes send; buffers: batches of each."""
    by_rank = zip(*(delivery.traffic for delivery in deliveries), strict=True)
    return max((sum(buffers * each.output + each.head for each in own) for own in by_rank), default=0)


def payload_of(config: RunConfig, settings: Teacher, teacher: Side, length: int) -> Payload:
    return Payload(
        num_rows=config.train.global_batch_size,
        length=length,
        vocab_size=teacher.vocab_size,
        hidden_size=teacher.size.hidden_size if config.handoff.type == "hidden_states" else None,
        itemsize=getattr(torch, settings.dtype).itemsize,
    )
