"""Settings that the memory estimate decides, `offload: auto` above all, and its report."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from math import floor
from typing import NamedTuple, TypeVar

from rich.table import Table
from rich.text import Text

from nemo_opd.config.model import Student
from nemo_opd.config.rollout import ServerRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.errors import ConfigError
from nemo_opd.preflight.memory import (
    SAMPLING,
    SERVER,
    SLACK,
    USABLE,
    Machine,
    Memory,
    MemoryEstimate,
    MemoryInputs,
    ModelSetup,
    Phase,
    Rank,
    estimate,
    sharing_server,
)
from nemo_opd.rollout.server.server_process import COMMON_SHARE, OWN_SHARE

_WAYS_OUT = (
    "smaller microbatches (train.micro_batch_size or train.micro_batch_tokens), a smaller train.max_length, "
    "student.activation_checkpointing=true, handoff.type=hidden_states, smaller batches of rollouts and answers, "
    "teachers in bfloat16, more parallelism.tp and more GPUs need less"
)
"""Settings that lower the memory, for a run that does not fit."""
_STUDENT = -1
"""Index of the student among teachers."""
_Model = TypeVar("_Model", Student, Teacher)


class _Way(NamedTuple):
    """A choice for every `auto`, which may be taken if `factor` times the estimate fits."""

    factor: float
    offloaded: tuple[int, ...]
    """Indices of the offloaded models."""
    most_gathered: int = -1
    """Bytes up to which the gathered weights of a model that is not offloaded stay on the device."""
    reduces_once: bool = False
    small_blocks: bool = False


def settle_memory(config: RunConfig, inputs: MemoryInputs) -> tuple[RunConfig, MemoryEstimate]:
    """Return the settings with every `auto` of offloading, resharding and gradient sync decided, and their estimate.

    Takes the first way that fits: first, if that fits easily, weights of at most a quarter of a GPU stay gathered and
    gradients are reduced once per step, or one of both; then neither, and nothing is offloaded; then teachers are, the
    largest first; then the student. Small blocks of logits come before more offloading. On CPU, with separate devices
    and if the GPU's memory is unknown, nothing is offloaded. Raises ConfigError if nothing fits, an `offload: auto` had
    to be decided and the run is not a dry run; explicit settings are not overruled.
    """
    undecided = [i for i, teacher in enumerate(config.active_teachers) if _is_undecided(teacher)]
    undecided.sort(key=lambda i: -inputs.teachers[i].size.parameters)
    undecided += [_STUDENT] if config.student.offload == "auto" else []
    device_bytes, is_gpu = inputs.machine.device_bytes, inputs.machine.device == "cuda"
    is_shared = is_gpu and config.cluster.placement == "colocated"
    quarter = (device_bytes or 0) // 4
    ways = [
        _Way(SLACK, (), *unsharded) for unsharded in ((quarter, True), (quarter, False), (-1, True)) if device_bytes
    ]
    for number in range(1 + len(undecided) * is_shared):
        ways += [_Way(1, tuple(undecided[:number]), small_blocks=small_blocks) for small_blocks in (False, True)]
    for way in ways:
        decided = _decide(config, inputs, way)
        estimated = estimate(decided, replace(inputs, small_blocks=way.small_blocks))
        if estimated.fits(way.factor):
            return decided, estimated
    if undecided and is_gpu and not config.run.dry_run:
        memory, condition = estimated.shortest, "with everything offloaded " if is_shared else ""
        raise ConfigError(
            f"student.offload=auto, teachers.*.offload=auto: {condition}{memory.name} would have to hold "
            f"{_gib(memory.peak)} in the phase {memory.peak_phase.value!r} ({largest_parts(memory)}), but has "
            f"{_gib(memory.capacity or 0)}; {_WAYS_OUT}; or set every offload to true or false, which "
            "starts the run without this check. run.dry_run=true prints the whole estimate"
        )
    return decided, estimated


def _is_undecided(model: Student | Teacher) -> bool:
    has_weights = isinstance(model, Student) or (model.weights != "student" and model.is_computed)
    return model.offload == "auto" and has_weights


def _decide(config: RunConfig, inputs: MemoryInputs, way: _Way) -> RunConfig:
    """Replace every `auto` in the settings, also of inactive teachers."""

    def decide(model: _Model, setup: ModelSetup | None, i: int) -> _Model:
        if _is_undecided(model):
            model = model.model_copy(update={"offload": i in way.offloaded})
        if model.parallelism.reshard_after_forward == "auto":
            stays = setup is not None and Rank(model, setup, inputs.machine.device).whole <= way.most_gathered
            model = model.with_parallelism(reshard_after_forward=model.offload in (True, "layers") or not stays)
        return model

    student = decide(config.student, inputs.student, _STUDENT)
    if student.sync_each_micro_batch == "auto":
        syncs = student.offload is True or not way.reduces_once
        student = student.model_copy(update={"sync_each_micro_batch": syncs})
    teachers = zip_longest(config.teachers, inputs.teachers)
    decided = tuple(decide(teacher, setup, i) for i, (teacher, setup) in enumerate(teachers))
    return config.model_copy(update={"student": student, "teachers": decided})


def server_share(config: RunConfig, estimated: MemoryEstimate, machine: Machine) -> float | None:
    """Return the share of a GPU's memory for the server: the least share plus the memory that is always free.

    If the server sleeps, only the rollout phase counts. None if it does not share GPUs or their memory is unknown.
    """
    if (server := sharing_server(config, machine)) is None:
        return None
    memory = estimated.memories[0]  # the student's first GPU, which the server uses
    used = memory.total(Phase.ROLLOUT) if server.sleeps_on_gpus else memory.peak
    free = max(0, floor(100 * (USABLE - used / (machine.device_bytes or 1)))) / 100
    return min(OWN_SHARE, COMMON_SHARE + free)


def memory_report(estimated: MemoryEstimate, config: RunConfig) -> Iterator[Table | Text]:
    """Yield each memory's peak and largest parts, the offloaded models, uncounted processes, and settings that help
    if the run does not fit.

    With `logging.console.memory_table`, also a table of parts and phases. config: settings with every `offload`
    decided, as `settle_memory` returns them.
    """
    for memory in estimated.memories:
        if memory.peak:
            if config.logging.console.memory_table:
                yield _parts_table(memory)
            text = peak_text(memory)
            yield Text(f"warning: {text}", "yellow") if memory.shortage else Text(text)
            yield Text(f"  most of it: {largest_parts(memory)}", "dim")
    models = {"student": config.student} | {teacher.name: teacher for teacher in config.active_teachers}
    names = [name for name, model in models.items() if model.offload in (True, "layers")]
    yield Text(f"in main memory while others use the device: {', '.join(names) or 'none'}")
    server, is_counted = config.rollout, any(part.owner == SERVER for part in estimated.memories[0].parts)
    if isinstance(server, ServerRollout) and server.shares_devices and not is_counted:
        yield Text(
            "not counted: the server that samples (rollout.type=server), a separate process on this machine; "
            "rollout.memory_share limits what it takes"
        )
    if not estimated.fits():
        yield Text(f"  {_WAYS_OUT}", "yellow")


def _parts_table(memory: Memory) -> Table:
    """Return a table of parts by phase in MiB, with the peak phase in bold."""
    sampled = [
        phase
        for phase in (Phase.ANSWERS, Phase.ROLLOUT)
        if any(p.at(phase) for p in memory.parts if p.name in SAMPLING)
    ]
    sampled += [Phase.ROLLOUT for part in memory.parts if part.owner == SERVER]
    phases = [phase for phase in Phase if phase in sampled or phase not in (Phase.ANSWERS, Phase.ROLLOUT)]
    table = Table("part", title=f"Memory estimate, {memory.name} (MiB)", title_justify="left")
    for phase in phases:
        table.add_column(phase.value, justify="right", style="bold" if phase is memory.peak_phase else "")
    for part in memory.parts:
        if any(part.num_bytes.values()):
            table.add_row(str(part), *(_mib(part.at(phase)) for phase in phases))
    table.add_section()
    table.add_row("all", *(_mib(memory.total(phase)) for phase in phases))
    return table


def largest_parts(memory: Memory) -> str:
    """Return the largest parts at the peak, such as `student: activations 40 MiB, …`."""
    phase = memory.peak_phase
    parts = sorted(memory.parts, key=lambda part: -part.at(phase))[:3]
    return ", ".join(f"{part} {_mib(part.at(phase))} MiB" for part in parts if part.at(phase))


def peak_text(memory: Memory) -> str:
    """Return the peak, the capacity, and by how much the peak is too large."""
    peak = f"{memory.name}: {_gib(memory.peak)} at the peak ({memory.peak_phase.value})"
    if memory.capacity is None:
        return f"{peak}; the available memory is unknown here"
    usage = f"{peak}, of {_gib(memory.capacity)}"
    return f"{usage}: {_gib(memory.shortage)} more than the usable {USABLE:.0%}" if memory.shortage else usage


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f}" if num_bytes else ""
