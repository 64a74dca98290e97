"""Estimate of each rank's memory, the offloading and resharding that it decides, and its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from math import floor
from typing import Literal, TypeVar

from rich.table import Table
from rich.text import Text

from nemo_opd.config.model import Student
from nemo_opd.config.rollout import ServerRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.errors import ConfigError
from nemo_opd.preflight.memory_parts import (
    LOADED,
    SLACK,
    USABLE,
    Machine,
    Memory,
    MemoryEstimate,
    MemoryInputs,
    Part,
    Phase,
    constant_part,
)
from nemo_opd.preflight.memory_processes import (
    student_parts,
    student_samples,
    teacher_processes,
    teachers_answer,
)
from nemo_opd.rollout.server.program import COMMON_SHARE, OWN_SHARE

CONTEXT_BYTES = 512 * 2**20
"""GPU memory of CUDA and its libraries per process."""
_ASLEEP_BYTES = 2 * 2**30
"""GPU memory of a sleeping server: CUDA, its libraries, captured graphs. Assumed, not measured."""
SERVER = "rollout server"
_SERVER_NOT_COUNTED = (
    "not counted: the server that samples (rollout.type=server), a separate process on this machine; "
    "rollout.memory_share limits what it takes"
)
_NUM_LARGEST = 3
_WAYS_OUT = (
    "smaller microbatches (train.micro_batch_size or train.micro_batch_tokens), a smaller train.max_length, "
    "student.activation_checkpointing=true, handoff.type=hidden_states, smaller batches of rollouts and answers, "
    "teachers in bfloat16, more parallelism.tp and more GPUs need less"
)
"""Settings that lower the memory, for a run that does not fit."""
_STUDENT_INDEX = -1
"""Stands for the student among indices of teachers."""
_Item = int | Literal["student", "gradients"]
"""Item that may stay unsharded: a teacher's weights (its index), the student's weights, or its gradients."""
_Model = TypeVar("_Model", Student, Teacher)


def estimate(config: RunConfig, situation: MemoryInputs) -> MemoryEstimate:
    """Return the bytes on one rank by part and phase, with the settings as they are: `offload: auto` counts as false.

    Parameters, gradients, optimizer state, handoff buffers and caches are exact; activations are estimated. Processes
    that share a GPU empty PyTorch's cache for each other, so each phase counts only live memory.
    """
    machine, is_separate = situation.machine, config.cluster.placement == "separate"
    processes = _processes(config, situation)
    devices = [[part for part in parts if not part.on_host or machine.device == "cpu"] for parts in processes]
    merged = [_merge(parts) for parts in (devices if is_separate else [chain(*devices)])]
    if machine.device == "cpu":
        memories = [("main memory for each rank", tuple(chain(*merged)), machine.host_share)]
    else:
        teachers = [teacher.name for teacher in config.active_teachers if not teacher.is_student]
        names = [f"each GPU of {name}" for name in ("the student", *teachers)] if is_separate else ["each GPU"]
        memories = [(name, parts, machine.device_bytes) for name, parts in zip(names, merged, strict=True)]
        host = (part for part in chain(*processes) if part.on_host)
        memories.append(("main memory for each GPU", _merge(host), machine.host_share))
    samples = any((student_samples(config), _sharing_server(config, machine), situation.student.longest_question))
    has_phase = {Phase.ANSWERS: teachers_answer(config), Phase.ROLLOUT: samples}
    phases = tuple(phase for phase in Phase if has_phase.get(phase, True))
    # PyTorch's cache grows to the memory of each process in its largest phase.
    cached = sum(max(sum(part.at(phase) for part in parts) for phase in Phase) for parts in devices)
    caches_fit = machine.device_bytes is not None and SLACK * cached < USABLE * machine.device_bytes
    return MemoryEstimate(tuple(Memory(*memory, phases) for memory in memories), situation.block_bytes, caches_fit)


def _processes(config: RunConfig, situation: MemoryInputs) -> list[list[Part]]:
    """Return the parts of each process of a rank.

    The student's process is first, and has the parts of teachers with its weights and of a rollout server.
    """
    processes = [student_parts(config, situation) + _server_parts(config, situation.machine)]
    for teacher in teacher_processes(config, situation):
        if teacher.settings.is_student:
            processes[0] += teacher.parts()
        else:
            processes.append(teacher.parts())
    if situation.device == "cuda":
        for parts in processes:
            parts.append(constant_part(parts[0].owner, "CUDA", CONTEXT_BYTES, *Phase))
    return processes


def _merge(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Add up the parts of one memory that have the same owner and name.

    Teachers take turns, so each phase counts the `in_turn` parts of the largest owner only.
    """
    parts = tuple(parts)
    in_turn_bytes: Counter[tuple[Phase, str]] = Counter()
    for part in parts:
        in_turn_bytes.update({(phase, part.owner): number * part.in_turn for phase, number in part.num_bytes.items()})
    largest_owner = dict(sorted(in_turn_bytes, key=in_turn_bytes.__getitem__))  # a later item replaces an earlier one
    merged: dict[tuple[str, str], Counter[Phase]] = {}
    for part in parts:
        phases = (phase for phase in part.num_bytes if not part.in_turn or largest_owner[phase] == part.owner)
        merged.setdefault((part.owner, part.name), Counter()).update({phase: part.at(phase) for phase in phases})
    return tuple(Part(owner, name, num_bytes) for (owner, name), num_bytes in merged.items())


def _sharing_server(config: RunConfig, machine: Machine) -> ServerRollout | None:
    """Return the rollout server on the training GPUs, or None if there is none or the GPUs' memory is unknown."""
    server = config.rollout
    if isinstance(server, ServerRollout) and server.shares_devices and machine.device_bytes is not None:
        return server
    return None


def _server_parts(config: RunConfig, machine: Machine) -> list[Part]:
    """Return the server's memory: `rollout.memory_share` or the least share; little while it sleeps."""
    if (server := _sharing_server(config, machine)) is None:
        return []
    awake = int((server.memory_share or COMMON_SHARE) * (machine.device_bytes or 0))
    asleep = _ASLEEP_BYTES if server.sleeps_on_gpus else awake
    return [Part(SERVER, "its share", dict.fromkeys(LOADED, asleep) | {Phase.ROLLOUT: awake})]


def server_share(config: RunConfig, estimated: MemoryEstimate, machine: Machine) -> float | None:
    """Return the share of a GPU's memory for the server: the least share plus the memory that is always free.

    If the server sleeps, only the rollout phase counts. None if it does not share GPUs or their memory is unknown.
    """
    if (server := _sharing_server(config, machine)) is None:
        return None
    memory = estimated.memories[0]  # the student's first GPU, which the server uses
    used = memory.total(Phase.ROLLOUT) if server.sleeps_on_gpus else memory.peak
    free = max(0, floor(100 * (USABLE - used / (machine.device_bytes or 1)))) / 100
    return min(OWN_SHARE, COMMON_SHARE + free)


def settle_memory(config: RunConfig, situation: MemoryInputs) -> tuple[RunConfig, MemoryEstimate]:
    """Return the settings with every `offload: auto` decided, and their estimate.

    Takes the smallest set that fits: none, then teachers, the largest first, then the student's parameters and
    optimizer. Small blocks of logits are tried before more is offloaded. On CPU, with separate devices and if the
    GPU's memory is unknown, nothing is offloaded. Raises ConfigError if nothing fits, an `auto` had to be decided and
    the run is not a dry run; explicit settings are not overruled.
    """
    undecided = [i for i, teacher in enumerate(config.active_teachers) if _has_auto_offload(teacher)]
    undecided.sort(key=lambda i: -situation.teachers[i].size.parameters)
    undecided += [_STUDENT_INDEX] if _has_auto_offload(config.student) else []
    small_blocks = replace(situation, small_blocks=True)
    is_shared = situation.device == "cuda" and config.cluster.placement == "colocated"
    for number in range(1 + (len(undecided) if is_shared else 0)):
        decided = _decide_offload(config, frozenset(undecided[:number]))
        for inputs in (situation, small_blocks):
            estimated = estimate(decided, inputs)
            if estimated.fits:
                return decided, estimated
    if undecided and situation.device == "cuda" and not config.run.dry_run:
        raise ConfigError(_does_not_fit(estimated.shortest, "with everything offloaded " if is_shared else ""))
    return decided, estimated


def _decide_offload(config: RunConfig, offloaded: frozenset[int]) -> RunConfig:
    """Set `offload: auto` to true for these models and to false for any other, also for inactive teachers."""

    def decide(model: _Model, index: int) -> _Model:
        return model.model_copy(update={"offload": index in offloaded}) if _has_auto_offload(model) else model

    teachers = tuple(decide(teacher, i) for i, teacher in enumerate(config.teachers))
    return config.model_copy(update={"teachers": teachers, "student": decide(config.student, _STUDENT_INDEX)})


def _has_auto_offload(model: Student | Teacher) -> bool:
    """Return whether the model has weights and `offload: auto`."""
    has_weights = isinstance(model, Student) or (model.weights != "student" and model.is_computed)
    return model.offload == "auto" and has_weights


def _does_not_fit(memory: Memory, condition: str) -> str:
    """Return the error message: the peak, its largest parts, the capacity and the way out."""
    assert memory.capacity is not None
    return (
        f"student.offload=auto, teachers.*.offload=auto: {condition}{memory.name} would have to hold "
        f"{gib(memory.peak)} in the phase {memory.peak_phase.value!r} ({largest_parts(memory)}), but has "
        f"{gib(memory.capacity)}; {_WAYS_OUT}; or set every offload to true or false, which starts the run without "
        "this check. run.dry_run=true prints the whole estimate"
    )


def resolve_resharding(config: RunConfig, situation: MemoryInputs) -> RunConfig:
    """Resolve every `reshard_after_forward: auto` and `sync_each_micro_batch: auto` in the settings.

    They become false if the unsharded item fits easily without more offloading. Items are tried in this order: the
    teachers' weights, smallest first, the student's weights, its gradients. They become true on CPU, with unknown GPU
    memory, and for offloaded models.
    """
    unsharded: list[_Item] = []
    for item in _auto_items(config, situation) if situation.machine.device_bytes is not None else ():
        if estimate(_with_unsharded(config, [*unsharded, item]), situation).fits_easily:
            unsharded.append(item)
    return _with_unsharded(config, unsharded)


def _auto_items(config: RunConfig, situation: MemoryInputs) -> Iterator[_Item]:
    """Yield the items with `auto` in the order of trial."""
    sizes = [setup.size.parameters for setup in situation.teachers]
    for i in sorted(range(len(sizes)), key=sizes.__getitem__):
        if config.teachers[i].has_model and _may_stay_gathered(config.teachers[i]):
            yield i
    if _may_stay_gathered(config.student):
        yield "student"
    if config.student.sync_each_micro_batch == "auto" and config.student.offload is not True:
        yield "gradients"


def _may_stay_gathered(model: Student | Teacher) -> bool:
    return model.parallelism.reshard_after_forward == "auto" and model.offload in (False, "auto")


def _with_unsharded(config: RunConfig, unsharded: Collection[_Item]) -> RunConfig:
    teachers = tuple(
        _with_resharding(teacher, reshards=i not in unsharded) for i, teacher in enumerate(config.teachers)
    )
    student = _with_resharding(config.student, reshards="student" not in unsharded)
    if student.sync_each_micro_batch == "auto":
        student = student.model_copy(update={"sync_each_micro_batch": "gradients" not in unsharded})
    return config.model_copy(update={"teachers": teachers, "student": student})


def _with_resharding(model: _Model, *, reshards: bool) -> _Model:
    if model.parallelism.reshard_after_forward != "auto":
        return model
    return model.with_parallelism(reshard_after_forward=reshards)


def memory_report(estimate: MemoryEstimate, config: RunConfig) -> Iterator[Table | Text]:
    """Yield each memory's peak and largest parts, the offloaded models, uncounted processes, and settings that help
    if the run does not fit.

    With `logging.console.memory_table`, also a table of parts and phases. config: settings with every `offload`
    decided, as `settle_memory` returns them.
    """
    for memory in estimate.memories:
        if memory.peak:
            if config.logging.console.memory_table:
                yield _parts_table(memory)
            yield _peak_line(memory)
            yield Text(f"  most of it: {largest_parts(memory)}", "dim")
    names = [teacher.name for teacher in config.active_teachers if teacher.offload in (True, "layers")]
    names += ["student"] if config.student.offload is True else []
    yield Text(f"in main memory while others use the device: {', '.join(names) or 'none'}")
    is_counted = any(part.owner == SERVER for memory in estimate.memories for part in memory.parts)
    if isinstance(config.rollout, ServerRollout) and config.rollout.shares_devices and not is_counted:
        yield Text(_SERVER_NOT_COUNTED)
    if not estimate.fits:
        yield Text(f"  {_WAYS_OUT}", "yellow")


def largest_parts(memory: Memory) -> str:
    """Return the largest parts at the peak, such as `student: activations 40 MiB, …`."""
    phase = memory.peak_phase
    parts = sorted(memory.parts, key=lambda part: -part.at(phase))[:_NUM_LARGEST]
    return ", ".join(f"{part} {_mib(part.at(phase))} MiB" for part in parts if part.at(phase))


def _parts_table(memory: Memory) -> Table:
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


def _peak_line(memory: Memory) -> Text:
    return Text(f"warning: {peak_text(memory)}", "yellow") if memory.shortage else Text(peak_text(memory))


def peak_text(memory: Memory) -> str:
    """Return the peak, the capacity, and by how much the peak is too large."""
    peak = f"{memory.name}: {gib(memory.peak)} at the peak ({memory.peak_phase.value})"
    if memory.capacity is None:
        return f"{peak}; the available memory is unknown here"
    usage = f"{peak}, of {gib(memory.capacity)}"
    return f"{usage}: {gib(memory.shortage)} more than the usable {USABLE:.0%}" if memory.shortage else usage


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f}" if num_bytes else ""
