"""The estimate for people: part by phase, what there is, and what would help."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from nemo_opd.config.rollout import ServerRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.training.memory.advice import gib
from nemo_opd.training.memory.estimate import USABLE, Memory, MemoryEstimate

NUM_LARGEST = 3
SERVER = (
    "not counted: the server that samples (rollout.type=server), a process of its own on this machine; keep its share "
    "of the devices small in rollout.options, or give it others in rollout.environment"
)


def memory_report(estimate: MemoryEstimate, config: RunConfig) -> Iterator[Table | Text]:
    """How each memory that anything is held in is used at its peak, and advice where it does not fit.

    The table part by phase comes with `logging.console.memory_table`. Also what is offloaded, and what is not counted;
    `config` is the one that the estimate has settled.
    """
    for memory in estimate.memories:
        if memory.peak:
            if config.logging.console.memory_table:
                yield memory_table(memory)
            yield verdict(memory)
            yield Text(f"  most of it: {largest_parts(memory)}", "dim")
    names = [teacher.name for teacher in config.active_teachers if teacher.offload is True]
    if config.student.offload is True:
        names.append("student")
    yield Text(f"in main memory while others use the device: {', '.join(names) or 'none'}")
    rollout = config.rollout
    if isinstance(rollout, ServerRollout) and rollout.url is None:
        yield Text(SERVER)
    for one in estimate.advice:
        yield Text(f"  {one.setting} would save {gib(one.saved_bytes)}", "yellow")


def memory_table(memory: Memory) -> Table:
    """In MiB; the phase of the peak is in bold."""
    title = f"Memory estimate, {memory.name} (MiB)"
    table = Table("part", *(phase.value for phase in memory.phases), title=title, title_justify="left")
    for column, phase in zip(table.columns[1:], memory.phases, strict=True):
        column.justify = "right"
        column.style = "bold" if phase is memory.peak_phase else ""
    for part in memory.parts:
        if any(part.num_bytes.values()):
            table.add_row(str(part), *(mib(part.at(phase)) for phase in memory.phases))
    table.add_section()
    table.add_row("all", *(mib(memory.total(phase)) for phase in memory.phases))
    return table


def largest_parts(memory: Memory) -> str:
    """At the peak, such as `student: activations 40 MiB, …`."""
    phase = memory.peak_phase
    parts = sorted(memory.parts, key=lambda part: -part.at(phase))[:NUM_LARGEST]
    return ", ".join(f"{part} {mib(part.at(phase))} MiB" for part in parts if part.at(phase))


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f}" if num_bytes else ""


def verdict(memory: Memory) -> Text:
    peak = f"{memory.name}: {gib(memory.peak)} at the peak ({memory.peak_phase.value})"
    if memory.capacity is None:
        return Text(f"{peak}; how much there is is not known here")
    there = f"{peak}, of {gib(memory.capacity)}"
    if not memory.shortage:
        return Text(there)
    over = f"{gib(memory.shortage)} more than the {USABLE:.0%} of it that can be planned with"
    return Text(f"warning: {there}: {over}", "yellow")
