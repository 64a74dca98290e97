"""Every rank's memory in every phase, what is offloaded because of it, and settings that would lower it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nemo_opd.config.handoff import HiddenStatesHandoff
from nemo_opd.config.on_policy import check_on_policy
from nemo_opd.config.rollout import HFRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.errors import ConfigError
from nemo_opd.training.memory.parts import SLACK, USABLE, Advice, Memory, MemoryEstimate, Part, Phase, Process, part
from nemo_opd.training.memory.report import gib, largest_parts
from nemo_opd.training.memory.sampling import rollouts, samples_in_workers
from nemo_opd.training.memory.server import server_parts, shares_gpus
from nemo_opd.training.memory.situation import Situation
from nemo_opd.training.memory.student import student_process
from nemo_opd.training.memory.teacher import teacher_processes, teachers_answer, teachers_at_work

CONTEXT_BYTES = 512 * 2**20
"""GPU memory of CUDA and its libraries in each process."""
_STUDENT = -1
"""Index of the student among the teachers' indices."""
_SMALLEST_SAVING = 0.01
"""Smallest saving that is advised, as a share of the peak."""


def settle_memory(config: RunConfig, situation: Situation) -> tuple[RunConfig, MemoryEstimate]:
    """Return the settings with every `offload: auto` decided, and their estimate.

    The smallest set that fits: none, then teachers, the largest first, then the student's parameters and optimizer. On
    CPU, with separate devices and where the GPU's memory is unknown: none. Small blocks of logits come before anything
    is offloaded. Raises ConfigError where nothing fits and an `auto` was left to decide, unless the run is a dry one;
    explicit settings are not overruled.
    """
    undecided = [i for i, teacher in enumerate(config.active_teachers) if _may_leave(teacher)]
    undecided.sort(key=lambda i: -situation.teachers[i].size.parameters)
    undecided += [_STUDENT] if config.student.offload == "auto" else []
    frugal = replace(situation, small_blocks=True)
    is_shared = situation.machine.device == "cuda" and config.cluster.placement == "colocated"
    for number in range(1 + (len(undecided) if is_shared else 0)):
        chosen = _with_offload(config, frozenset(undecided[:number]))
        for around in (situation, frugal):
            estimated = estimate(chosen, around)
            if estimated.fits:
                return chosen, estimated
    estimated = replace(estimated, advice=tuple(advice(chosen, frugal)))
    if undecided and situation.machine.device == "cuda" and not config.run.dry_run:
        raise ConfigError(_complaint(estimated))
    return chosen, estimated


def _with_offload(config: RunConfig, offloaded: frozenset[int]) -> RunConfig:
    """Decide `auto`: yes for these models and no for all others, including teachers that are not active."""
    teachers = tuple(
        teacher.model_copy(update={"offload": i in offloaded}) if _may_leave(teacher) else teacher
        for i, teacher in enumerate(config.teachers)
    )
    student = config.student
    if student.offload == "auto":
        student = student.model_copy(update={"offload": _STUDENT in offloaded})
    return config.model_copy(update={"teachers": teachers, "student": student})


def _may_leave(teacher: Teacher) -> bool:
    """Return whether the estimate decides if a teacher's weights leave the device, where it has weights."""
    return teacher.offload == "auto" and teacher.weights != "student" and teacher.is_computed


def _complaint(estimated: MemoryEstimate) -> str:
    memory = estimated.shortest
    helps = "; ".join(f"{each.setting} saves {gib(each.saved_bytes)}" for each in estimated.advice)
    assert memory.capacity is not None
    return (
        f"student.offload=auto, teachers.*.offload=auto: with everything offloaded {memory.name} would have to hold "
        f"{gib(memory.peak)} in the phase {memory.peak_phase.value!r} ({largest_parts(memory)}), and there are "
        f"{gib(memory.capacity)}; {helps or 'use more GPUs'}; or set every offload to true or false, which starts the "
        "run without this check. run.dry_run=true prints the whole estimate"
    )


def estimate(config: RunConfig, situation: Situation) -> MemoryEstimate:
    """Return the bytes on one rank by part and phase, with the settings as they are; `offload: auto` counts as no.

    Parameters, gradients, optimizer state, handoff buffers and caches are exact; activations are estimated. Processes
    that share a GPU return to it what PyTorch caches, so each phase counts what is alive.
    """
    machine = situation.machine
    processes = _in_processes(config, student_process(config, situation), teacher_processes(config, situation))
    host = tuple(part for process in processes for part in process.host)
    if machine.device == "cpu":
        parts = [part for process in processes for part in process.device]
        memories = [("main memory for each rank", (*parts, *host), machine.host_share)]
    else:
        devices = [_with_context(process) for process in processes]
        devices[0] += server_parts(config, machine)
        if config.cluster.placement == "colocated":
            memories = [("each GPU", sum(devices, ()), machine.device_bytes)]
        else:
            names = ("the student", *(each.name for each in config.active_teachers if not each.is_student))
            memories = [
                (f"each GPU of {name}", parts, machine.device_bytes) for name, parts in zip(names, devices, strict=True)
            ]
        memories.append(("main memory for each GPU", host, machine.host_share))
    samples = samples_in_workers(config) or shares_gpus(config, machine) or bool(situation.student.longest_question)
    there = {Phase.ANSWERS: teachers_answer(config), Phase.ROLLOUT: samples}
    phases = tuple(phase for phase in Phase if there.get(phase, True))
    found = tuple(Memory(name, parts, capacity, phases) for name, parts, capacity in memories)
    return MemoryEstimate(found, situation.block_bytes, _caches_fit(config, situation))


def _in_processes(config: RunConfig, student: Process, teachers: Sequence[Process]) -> list[Process]:
    """Return the processes of a rank, the student's first: teachers with its weights are in it."""
    inside = [own for own, each in zip(teachers, config.active_teachers, strict=True) if each.is_student]
    device, host = student.device, student.host
    for own in inside:
        device, host = (*device, *own.device), (*host, *own.host)
    others = [own for own, each in zip(teachers, config.active_teachers, strict=True) if not each.is_student]
    return [Process(device, host), *others]


def _caches_fit(config: RunConfig, situation: Situation) -> bool:
    """Return whether a GPU has room for what each of its processes holds in its own largest phase, at the same time."""
    if situation.machine.device_bytes is None:
        return False
    processes = _in_processes(config, student_process(config, situation), teachers_at_work(config, situation))
    kept = [max(sum(part.at(phase) for part in _with_context(each)) for phase in Phase) for each in processes]
    return SLACK * sum(kept) < USABLE * situation.machine.device_bytes


def _with_context(process: Process) -> tuple[Part, ...]:
    return (*process.device, part(process.device[0].owner, "CUDA", CONTEXT_BYTES, *Phase))


def advice(config: RunConfig, situation: Situation) -> list[Advice]:
    """Return changes that lower the peak of the memory that is short, each alone, largest saving first."""
    short = estimate(config, situation).shortest
    found = []
    for setting, changed, around in variants(config, situation):
        peaks = {memory.name: memory.peak for memory in estimate(changed, around).memories}
        found.append(Advice(setting, short.peak - peaks[short.name]))
    worth = [each for each in found if each.saved_bytes > _SMALLEST_SAVING * short.peak]
    return sorted(worth, key=lambda each: each.saved_bytes, reverse=True)


def variants(config: RunConfig, situation: Situation) -> Iterator[tuple[str, RunConfig, Situation]]:
    """Yield settings to write, and the run with each."""
    for section, key, value in _changes(config, situation):
        name, _, index = section.partition(".")
        changed = getattr(config, name)
        if index:
            teachers = [*changed]
            teachers[int(index)] = teachers[int(index)].model_copy(update={key: value})
            changed = tuple(teachers)
        else:
            changed = changed.model_copy(update={key: value})
        run = config.model_copy(update={name: changed})
        if _is_allowed(run):
            yield f"{section}.{key}={'null' if value is None else str(value).lower()}", run, situation
    if config.handoff.type == "logits":
        yield "handoff.type=hidden_states", config.model_copy(update={"handoff": HiddenStatesHandoff()}), situation
    yield from _other_layouts(config, situation)


def _changes(config: RunConfig, situation: Situation) -> Iterator[tuple[str, str, object]]:
    """Yield sections, keys and values; some may be refused."""
    train, rollout, questions = config.train, config.rollout, config.evaluation
    if config.student.sync_each_micro_batch is False:
        yield "student", "sync_each_micro_batch", True
    if not config.student.activation_checkpointing:
        yield "student", "activation_checkpointing", True
    if train.micro_batch_tokens is not None:
        yield "train", "micro_batch_tokens", max(2, train.micro_batch_tokens // 2)
    elif train.micro_batch_size > 1:
        yield "train", "micro_batch_size", train.micro_batch_size // 2
    yield "train", "global_batch_size", max(1, train.global_batch_size // 2)
    yield "train", "max_length", max(2, train.max_length // 2)
    if train.async_save:
        yield "train", "async_save", False
    if config.logging.gradients_every is not None:
        yield "logging", "gradients_every", None
    if isinstance(rollout, HFRollout) and (rows := rollouts(config, situation.student.layout.dp).rows) > 1:
        yield "rollout", "batch_size", rows // 2
    if rollout is None and questions is not None and questions.batch_size > 1:
        yield "evaluation", "batch_size", questions.batch_size // 2
    if questions is not None and teachers_answer(config):
        if questions.teacher_batch_size > 1:
            yield "evaluation", "teacher_batch_size", questions.teacher_batch_size // 2
        yield "evaluation", "teachers", False
    if situation.machine.device == "cpu":
        return
    if config.student.offload is not True:
        yield "student", "offload", True
    for i, teacher in enumerate(config.active_teachers):
        if teacher.offload in (False, "auto") and teacher.weights != "student":
            yield f"teachers.{i}", "offload", True
        may_stream = teacher.has_model and not teacher.compile and not teachers_answer(config)
        if teacher.offload != "layers" and may_stream and teacher.parallelism.frees_gathered:
            yield f"teachers.{i}", "offload", "layers"
        if teacher.dtype == "float32" and not teacher.is_student:
            yield f"teachers.{i}", "dtype", "bfloat16"


def _is_allowed(config: RunConfig) -> bool:
    """Return whether the settings would pass; copies are not validated."""
    try:
        if config.rollout is not None:
            check_on_policy(config)
    except ValueError:
        return False
    return True


def _other_layouts(config: RunConfig, situation: Situation) -> Iterator[tuple[str, RunConfig, Situation]]:
    """Yield a single copy of each model, and twice its tensor parallelism where data-parallel ranks are left for it."""
    for i, setup in enumerate((situation.student, *situation.teachers)):
        if i and not config.active_teachers[i - 1].has_model:
            continue
        layout, found = setup.layout, {}
        if layout.replicas > 1:
            found["replicas=1"] = replace(layout, replicas=1)
        if layout.dp // layout.replicas % 2 == 0 and (i or config.student.lora is None):
            found[f"tp={2 * layout.tp}"] = replace(layout, dp=layout.dp // 2, tp=2 * layout.tp)
        for setting, other in found.items():
            changed = situation.with_layouts({i: other}, config)
            yield f"{f'teachers.{i - 1}' if i else 'student'}.parallelism.{setting}", config, changed
