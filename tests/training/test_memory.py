"""The memory estimate, and the choices, reports and errors that follow from it."""

import io
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from transformers import LlamaConfig, Qwen3Config

from nemo_opd.config import RunConfig
from nemo_opd.config.rollout import ServerRollout
from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ConfigError
from nemo_opd.preflight.memory import (
    CONTEXT_BYTES,
    USABLE,
    Machine,
    MemoryEstimate,
    MemoryInputs,
    ModelSetup,
    Phase,
    estimate,
)
from nemo_opd.preflight.memory_choices import memory_report, settle_memory
from nemo_opd.preflight.model_info import ModelSize, model_size, numel
from nemo_opd.preflight.plan import Plan
from tests.composition import compose

GIB = 2**30


@pytest.fixture(scope="module")
def sizes() -> list[ModelSize]:
    """Sizes of a student with 1 and teachers with 4 and 1 billion parameters."""
    small = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    large = Qwen3Config(
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    return [model_size(small), model_size(large), model_size(small)]


def configure(*overrides: str) -> RunConfig:
    """Return the demo's settings for larger models: a cross-tokenizer and a same-tokenizer teacher."""
    config = compose(
        "train.max_length=2048",
        "train.global_batch_size=16",
        "train.micro_batch_size=4",
        "student.activation_checkpointing=true",
        "teachers.0.dtype=bfloat16",
        "teachers.1.dtype=bfloat16",
        *overrides,
    )
    assert len(config.teachers) == 2
    return config


def memory_inputs(sizes: list[ModelSize], *, gib: float | None, device: str = "cuda", ranks: int = 1) -> MemoryInputs:
    student, *teachers = (ModelSetup(size, size.vocab_size, Layout(ranks)) for size in sizes)
    machine = Machine(device, None if gib is None else int(gib * GIB), 256 * GIB, ranks)
    return MemoryInputs(student, tuple(teachers), machine)


def offloaded(config: RunConfig) -> tuple[bool | str, bool | str, bool | str]:
    return config.teachers[0].offload, config.teachers[1].offload, config.student.offload


def with_offloads(config: RunConfig, *flags: bool | str) -> RunConfig:
    teachers = tuple(
        teacher.model_copy(update={"offload": flag}) for teacher, flag in zip(config.teachers, flags[:2], strict=True)
    )
    return config.model_copy(
        update={"teachers": teachers, "student": config.student.model_copy(update={"offload": flags[2]})}
    )


def gib_needed(config: RunConfig, sizes: list[ModelSize], *flags: bool) -> float:
    """Return the GiB of the smallest GPU for the run."""
    inputs = memory_inputs(sizes, gib=None)
    return estimate(with_offloads(config, *flags), inputs).memories[0].peak / USABLE / GIB + 0.01


# Offloading


def test_as_little_is_offloaded_as_fits(sizes: list[ModelSize]) -> None:
    """Bug: another order than the larger teacher, the smaller teacher, the student; or one more than needed."""
    config = configure("train.micro_batch_size=1", "+teachers.0.micro_batch_tokens=32768")
    steps = [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]
    limits = [gib_needed(config, sizes, *flags) for flags in steps]
    assert sorted(set(limits), reverse=True) == limits

    for flags, gib in zip(steps, limits, strict=True):
        inputs = memory_inputs(sizes, gib=gib)
        settled, estimated = settle_memory(config, inputs)
        assert offloaded(settled) == flags
        assert estimated.fits()
        assert estimated in [estimate(settled, replace(inputs, small_blocks=are_small)) for are_small in (False, True)]


@pytest.mark.parametrize("setting", [{"micro_batch_tokens": 10**9}, {"micro_batch_size": 64}], ids=str)
def test_a_microbatch_has_at_most_a_ranks_rows_of_a_batch(sizes: list[ModelSize], setting: dict[str, int]) -> None:
    """Bug: weights are offloaded or the run is refused because of rows that no batch has."""
    inputs, config = memory_inputs(sizes, gib=None, ranks=2), configure()
    large = config.model_copy(update={"train": config.train.model_copy(update=setting)})
    expected = estimate(configure("train.micro_batch_size=8"), inputs).memories[0].peak
    assert estimate(large, inputs).memories[0].peak == expected
    assert expected > estimate(config, inputs).memories[0].peak


def test_small_blocks_come_before_offloading(sizes: list[ModelSize]) -> None:
    """Bug: a teacher is offloaded although the run fits with small blocks; large ones take 1/32 of the memory more."""
    config = configure()
    smallest = gib_needed(config, sizes, False, False, False)
    tight, ample = (settle_memory(config, memory_inputs(sizes, gib=gib)) for gib in (smallest, 1.1 * smallest))

    assert offloaded(tight[0]) == offloaded(ample[0]) == (False, False, False)
    assert tight[1].block_bytes == 256 * 2**20
    assert ample[1].block_bytes == int(1.1 * smallest * GIB) // 32


def test_explicit_offload_settings_stay(sizes: list[ModelSize]) -> None:
    """Bug: a setting is changed because the run then fits better, or without need."""
    config = configure("teachers.0.offload=false", "student.offload=true")
    settled, _ = settle_memory(config, memory_inputs(sizes, gib=1000))
    assert offloaded(settled) == (False, False, True)

    settled, _ = settle_memory(config, memory_inputs(sizes, gib=gib_needed(config, sizes, False, True, True)))
    assert offloaded(settled) == (False, True, True)


@pytest.mark.parametrize(("device", "gib"), [("cpu", 1e-3), ("cuda", None)])
def test_nothing_is_offloaded_on_a_cpu_or_in_unknown_memory(
    sizes: list[ModelSize], device: str, gib: float | None
) -> None:
    config = configure()
    settled, _ = settle_memory(config, memory_inputs(sizes, gib=gib, device=device))

    assert offloaded(settled) == (False, False, False)


def test_offload_of_inactive_teachers_is_resolved(sizes: list[ModelSize]) -> None:
    """Bug: settings of workers and a run's config.yaml contain `auto`."""
    config = configure("loss.kd_weight=0")
    inputs = replace(memory_inputs(sizes, gib=80), teachers=())
    settled, estimated = settle_memory(config, inputs)

    assert offloaded(settled) == (False, False, False)
    assert {part.owner for part in estimated.memories[0].parts} == {"student"}


# Errors


def test_a_run_that_does_not_fit_is_refused_with_figures_and_proposals(sizes: list[ModelSize]) -> None:
    config = configure()
    with pytest.raises(ConfigError) as caught:
        settle_memory(config, memory_inputs(sizes, gib=8, ranks=2))

    message = str(caught.value)
    assert message.startswith(
        "student.offload=auto, teachers.*.offload=auto: with everything offloaded each GPU would have "
    )
    assert "but has 8.0 GiB" in message
    for setting in ("train.micro_batch_size", "train.max_length", "parallelism.tp", "run.dry_run=true"):
        assert setting in message


def test_a_dry_run_reports_that_it_does_not_fit(sizes: list[ModelSize]) -> None:
    config = configure("run.dry_run=true", "student.activation_checkpointing=false")
    settled, estimated = settle_memory(config, memory_inputs(sizes, gib=8))
    report = printed(settled, estimated)

    assert offloaded(settled) == (True, True, True)
    assert not estimated.fits()
    assert "warning: each GPU: " in report
    assert "of 8.0 GiB" in report
    assert "a smaller train.max_length" in report


def test_separate_devices_are_refused_without_offloading(sizes: list[ModelSize]) -> None:
    """Bug: the message says "with everything offloaded", although nothing is."""
    config = configure("cluster.placement=separate")
    with pytest.raises(ConfigError) as caught:
        settle_memory(config, memory_inputs(sizes, gib=8))
    message = str(caught.value)
    assert "teachers.*.offload=auto: each GPU of the student would have to hold" in message
    assert "with everything offloaded" not in message


def test_a_run_with_explicit_offload_settings_is_not_refused(sizes: list[ModelSize]) -> None:
    """The estimate may be wrong by a fifth, so users need a way to ignore it."""
    config = configure("teachers.0.offload=true", "teachers.1.offload=true", "student.offload=true")
    settled, estimated = settle_memory(config, memory_inputs(sizes, gib=8))

    assert offloaded(settled) == (True, True, True)
    assert not estimated.fits()


def test_main_memory_may_be_too_small(sizes: list[ModelSize]) -> None:
    """Bug: weights are offloaded to main memory that cannot hold them."""
    config = configure()
    inputs = memory_inputs(sizes, gib=gib_needed(config, sizes, True, True, True))
    tight = replace(inputs, machine=replace(inputs.machine, host_bytes=4 * GIB))

    with pytest.raises(ConfigError, match="main memory for each GPU would have to hold"):
        settle_memory(config, tight)


# The estimate


def total(estimated: MemoryEstimate, name: str, phase: Phase) -> int:
    return sum(part.at(phase) for part in estimated.memories[0].parts if str(part) == name)


def test_processes_that_share_a_gpu_have_a_context_each(sizes: list[ModelSize]) -> None:
    """Bug: one context for all processes. Their caches do not count: a process empties its cache before the next."""
    estimated = estimate(with_offloads(configure(), False, False, False), memory_inputs(sizes, gib=80)).memories[0]
    contexts = {part.owner: part.at(Phase.LOSS) for part in estimated.parts if part.name == "CUDA"}
    assert list(contexts.values()) == 3 * [CONTEXT_BYTES]


def test_offloading_leaves_only_buffers_on_the_device(sizes: list[ModelSize]) -> None:
    config = with_offloads(configure(), True, True, True)
    gone, host = estimate(config, memory_inputs(sizes, gib=80)).memories
    remaining = {str(part) for part in gone.parts if part.at(Phase.BACKWARD) and part.owner != "student"}

    assert {name.split(": ")[1] for name in remaining} == {"hidden states handed over", "head handed over", "CUDA"}
    assert {str(part) for part in gone.parts if part.at(Phase.TEACHERS) and part.owner == "student"} == {
        "student: CUDA"
    }
    # The host's copies stay while their models are on the device.
    all_weights = 12 * sizes[0].parameters + 2 * (sizes[1].parameters + sizes[2].parameters)
    assert host.total(Phase.TEACHERS) == host.total(Phase.BACKWARD) == all_weights


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("offload", [True, False])
def test_every_phase_holds_at_least_weights_and_optimizer(sizes: list[ModelSize], offload: bool, ranks: int) -> None:
    """Compares with plain sums: a weight takes 4 bytes in the student, 8 in AdamW, 4 as gradient, 2 in a teacher."""
    config = with_offloads(configure(), offload, offload, offload)
    gpu, host = estimate(config, memory_inputs(sizes, gib=80, ranks=ranks)).memories
    student, *teachers = (size.parameters / ranks for size in sizes)
    all_weights, working_weights = 2 * sum(teachers), 2 * max(teachers)
    states = {
        Phase.LOADING: 4 * student + all_weights,
        Phase.TEACHERS: working_weights if offload else 12 * student + all_weights,
        Phase.LOSS: 12 * student + (0 if offload else all_weights),
        Phase.BACKWARD: 16 * student + (0 if offload else all_weights),
    }
    assert all(gpu.total(phase) >= expected for phase, expected in states.items())
    assert host.total(Phase.TEACHERS) >= (12 * student + all_weights if offload else 0)


def test_two_layers_of_a_streamed_teacher_are_on_the_device(sizes: list[ModelSize]) -> None:
    """Bug: all layers of a streamed teacher count, so the run is refused or other models are offloaded."""
    config = with_offloads(configure(), "layers", False, False)
    gpu, host = estimate(config, memory_inputs(sizes, gib=80)).memories
    (weights,) = [part for part in gpu.parts if part.owner == config.teachers[0].name and part.name == "parameters"]
    there = numel(sizes[1].rest) + 2 * numel(sizes[1].layers[0].shapes)

    assert weights.at(Phase.TEACHERS) == 2 * there < sizes[1].parameters
    assert weights.at(Phase.BACKWARD) == 0
    assert host.total(Phase.TEACHERS) == host.total(Phase.BACKWARD) == 2 * sizes[1].parameters


def test_a_student_without_logits(sizes: list[ModelSize]) -> None:
    """Bugs: logits of all positions count although blocks of rows replace them; the head's gradient does not count."""
    with_logits, headless = (
        estimate(with_offloads(configure(f"handoff={kind}"), False, False, False), memory_inputs(sizes, gib=80))
        for kind in ("logits", "hidden_states")
    )
    tokens, vocabulary, width = 4 * 2048, 128_256, 2048

    assert total(with_logits, "student: logits and their gradients", Phase.LOSS) == 2 * tokens * vocabulary * 2
    assert total(headless, "student: logits and their gradients", Phase.LOSS) == 0
    gradients = vocabulary * width * (4 + 2) + tokens * width * 2
    assert total(headless, "student: gradients of hidden states and head", Phase.LOSS) == gradients
    # Blocks of all heads have equal rows and share the budget, 1/32 of the GPU; the student's block has a gradient.
    budget = 80 * GIB // 32
    rows = budget // (4 * sum(size.vocab_size for size in sizes))
    blocks = total(headless, "student: blocks of logits, temporaries of a loss", Phase.LOSS)
    assert blocks == 4 * rows * (sum(size.vocab_size for size in sizes) + vocabulary) + budget
    assert headless.memories[0].peak < with_logits.memories[0].peak


def test_blocks_on_a_cpu_have_the_rows_of_a_product(sizes: list[ModelSize]) -> None:
    """Bug: the estimate counts 64 MiB, but 128 rows of three large vocabularies take more."""
    config = with_offloads(configure("handoff=hidden_states"), False, False, False)
    blocks = total(
        estimate(config, memory_inputs(sizes, gib=None, device="cpu")),
        "student: blocks of logits, temporaries of a loss",
        Phase.LOSS,
    )
    numbers = sum(size.vocab_size for size in sizes) + sizes[0].vocab_size
    assert blocks == 4 * 128 * numbers + 64 * 2**20


def test_teachers_on_their_own_devices(sizes: list[ModelSize]) -> None:
    """Bugs: one peak for the devices of all models; one buffer for a teacher that works ahead and has two."""
    config = configure("cluster.placement=separate")
    settled, estimated = settle_memory(config, memory_inputs(sizes, gib=80))
    student, cross, *_ = estimated.memories

    assert offloaded(settled) == (False, False, False)
    assert {part.owner for part in student.parts} == {"student"}
    assert {part.owner for part in cross.parts} == {config.teachers[0].name}
    (handed,) = [part for part in cross.parts if part.name == "hidden states handed over"]
    assert handed.at(Phase.TEACHERS) == 2 * 16 * 2048 * 2560 * 2
    copies = [part.at(Phase.LOSS) for part in student.parts if part.name.endswith(", copied")]
    assert copies == [0, 0]


def test_the_students_weights_count_once_and_their_average_in_fp32(sizes: list[ModelSize]) -> None:
    """Bugs: a second copy for a teacher with the student's weights; an average in bf16; a process for such teachers."""
    student = sizes[0]
    inputs = memory_inputs([student, student, sizes[2]], gib=80)

    def run(weights: str, *flags: bool, **more: object) -> RunConfig:
        config = configure("student.offload=false", "teachers.1.offload=false", "teachers.0.offload=false")
        self_teacher = config.teachers[0].model_copy(update={"model": None, "weights": weights, **more})
        return config.model_copy(update={"teachers": (self_teacher, config.teachers[1])})

    live, mean = (estimate(run(weights), inputs).memories[0] for weights in ("student", "ema"))
    frozen = estimate(run("frozen", model="m"), inputs).memories[0]
    parameters = sum(part.at(Phase.BACKWARD) for part in live.parts if part.name in ("parameters", "average"))
    assert parameters == (4 + 2) * student.parameters
    for phase in Phase:
        assert mean.total(phase) == live.total(phase) + 4 * student.parameters
    contexts = [sum(part.name == "CUDA" for part in memory.parts) for memory in (live, mean, frozen)]
    assert contexts == [2, 2, 3]
    away = estimate(run("ema", offload=True), inputs).memories[0]
    assert away.total(Phase.LOSS) == live.total(Phase.LOSS)
    assert away.total(Phase.TEACHERS) >= live.total(Phase.TEACHERS)


# The report


def printed(config: RunConfig, estimated: MemoryEstimate) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    for renderable in memory_report(estimated, config):
        console.print(renderable)
    return console.export_text()


def test_the_report_has_a_table_of_parts_and_phases(sizes: list[ModelSize]) -> None:
    config = configure("logging.console.memory_table=true")
    settled, estimated = settle_memory(config, memory_inputs(sizes, gib=gib_needed(config, sizes, True, False, False)))
    report = printed(settled, estimated)
    rows = {cells[1].strip(): cells[2:] for line in report.splitlines() if len(cells := line.split("│")) > 6}

    optimizer = [cell.strip() for cell in rows["student: optimizer"]]
    assert optimizer[:4] == ["", *([f"{sizes[0].parameters * 8 / 2**20:,.0f}"] * 3)]
    assert f"in main memory while others use the device: {config.teachers[0].name}" in report
    assert "warning" not in report


def test_the_report_is_short_unless_asked_for(sizes: list[ModelSize]) -> None:
    """Bug: sixty lines of parts before the line that says whether the run fits."""
    config = configure()
    report = printed(*settle_memory(config, memory_inputs(sizes, gib=80)))
    assert len(report.splitlines()) <= 8
    assert re.search(r"most of it: \w+: [a-z ]+ [\d,]+ MiB", report)


# Emptying the cache


def test_caches_fit_if_the_largest_phases_of_all_processes_do(sizes: list[ModelSize]) -> None:
    """Bugs: caches are emptied in every step although they fit; a process keeps memory that another needs."""
    config = configure()
    together = estimate(config, memory_inputs(sizes, gib=None)).memories[0].peak / GIB
    assert not estimate(config, memory_inputs(sizes, gib=together / USABLE)).caches_fit
    assert not estimate(config, memory_inputs(sizes, gib=None)).caches_fit
    assert estimate(config, memory_inputs(sizes, gib=4 * together)).caches_fit


@pytest.mark.parametrize(
    ("device", "launcher", "shared", "caches_fit", "server", "expected"),
    [
        ("cuda", "ray", 3, False, None, True),
        ("cuda", "ray", 3, True, None, False),
        ("cuda", "ray", 1, False, None, False),
        ("cuda", "local", 3, False, None, False),
        ("cpu", "ray", 3, False, None, False),
        ("cuda", "ray", 1, True, "own", True),
        ("cuda", "ray", 1, True, "on its own GPU", False),
        ("cuda", "local", 1, True, "http://host:1/v1", False),
    ],
)
def test_processes_that_empty_their_cache(
    device: str, launcher: str, shared: int, caches_fit: bool, server: str | None, expected: bool
) -> None:
    """Bug: the cache is emptied although no second process is on the device."""
    rollouts = {None: None, "own": ServerRollout(), "on its own GPU": ServerRollout(gpus=1)}
    rollout = rollouts[server] if server in rollouts else ServerRollout(url=server)
    config = configure(f"cluster.launcher={launcher}").model_copy(update={"rollout": rollout})
    plan: Any = SimpleNamespace(
        config=config,
        device=device,
        placement=SimpleNamespace(groups_per_device=shared),
        memory=SimpleNamespace(caches_fit=caches_fit),
    )
    assert Plan.empties_cache.fget(plan) is expected  # type: ignore[attr-defined]
