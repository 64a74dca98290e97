"""Memory estimate as text: parts by phase, the available memory, and settings that would help."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from nemo_opd.config.rollout import ServerRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.training.memory.estimate import SERVER
from nemo_opd.training.memory.parts import USABLE, Memory, MemoryEstimate

_NUM_LARGEST = 3
_SERVER = (
    "not counted: the server that samples (rollout.type=server), a separate process on this machine; "
    "rollout.memory_share limits what it takes"
)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f}" if num_bytes else ""


def memory_report(estimate: MemoryEstimate, config: RunConfig) -> Iterator[Table | Text]:
    """Yield each memory's peak and largest parts, the offloaded models, uncounted processes, and advice.

    With `logging.console.memory_table`, also a table of parts and phases. config: settings with every `offload`
    decided, as `settle_memory` returns them.
    """
    for memory in estimate.memories:
        if memory.peak:
            if config.logging.console.memory_table:
                yield _table(memory)
            yield _verdict(memory)
            yield Text(f"  most of it: {largest_parts(memory)}", "dim")
    names = [teacher.name for teacher in config.active_teachers if teacher.offload in (True, "layers")]
    names += ["student"] if config.student.offload is True else []
    yield Text(f"in main memory while others use the device: {', '.join(names) or 'none'}")
    is_counted = any(part.owner == SERVER for memory in estimate.memories for part in memory.parts)
    if isinstance(config.rollout, ServerRollout) and config.rollout.shares_devices and not is_counted:
        yield Text(_SERVER)
    for change in estimate.advice:
        yield Text(f"  {change.setting} would save {gib(change.saved_bytes)}", "yellow")


def largest_parts(memory: Memory) -> str:
    """Return the largest parts at the peak, such as `student: activations 40 MiB, …`."""
    phase = memory.peak_phase
    parts = sorted(memory.parts, key=lambda part: -part.at(phase))[:_NUM_LARGEST]
    return ", ".join(f"{part} {_mib(part.at(phase))} MiB" for part in parts if part.at(phase))


def _table(memory: Memory) -> Table:
    """Return a table of parts by phase in MiB, with the peak phase in bold."""
    title = f"Memory estimate, {memory.name} (MiB)"
    table = Table("part", title=title, title_justify="left")
    for phase in memory.phases:
        table.add_column(phase.value, justify="right", style="bold" if phase is memory.peak_phase else "")
    for part in memory.parts:
        if any(part.num_bytes.values()):
            table.add_row(str(part), *(_mib(part.at(phase)) for phase in memory.phases))
    table.add_section()
    table.add_row("all", *(_mib(memory.total(phase)) for phase in memory.phases))
    return table


def _verdict(memory: Memory) -> Text:
    peak = f"{memory.name}: {gib(memory.peak)} at the peak ({memory.peak_phase.value})"
    if memory.capacity is None:
        return Text(f"{peak}; the available memory is unknown here")
    usage = f"{peak}, of {gib(memory.capacity)}"
    if not memory.shortage:
        return Text(usage)
    over = f"{gib(memory.shortage)} more than the usable {USABLE:.0%}"
    return Text(f"warning: {usage}: {over}", "yellow")
