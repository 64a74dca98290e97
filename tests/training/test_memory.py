"""What is planned with the estimate: what is offloaded, what is printed and what is refused."""

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
    """A student of 1 and teachers of 4 and 1 billion parameters."""
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
    """The demo's settings for larger models: a cross-tokenizer and a same-tokenizer teacher."""
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


def changed(override: str) -> RunConfig:
    """Return `configure` with another size of microbatches, of which only one may be set."""
    config = configure()
    name, _, value = override.removeprefix("train.").partition("=")
    return config.model_copy(update={"train": config.train.model_copy(update={name: int(value)})})


def situation(sizes: list[ModelSize], *, gib: float | None, device: str = "cuda", ranks: int = 1) -> MemoryInputs:
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


def needed(config: RunConfig, sizes: list[ModelSize], *flags: bool) -> float:
    """GiB of a GPU into which the run just fits."""
    around = situation(sizes, gib=None)
    return estimate(with_offloads(config, *flags), around).memories[0].peak / USABLE / GIB + 0.01


# What is offloaded


def test_as_little_is_offloaded_as_fits(sizes: list[ModelSize]) -> None:
    """First the larger teacher, then the other, then the student."""
    config = configure("train.micro_batch_size=1", "+teachers.0.micro_batch_tokens=32768")
    steps = [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]
    limits = [needed(config, sizes, *flags) for flags in steps]
    assert sorted(set(limits), reverse=True) == limits

    for flags, gib in zip(steps, limits, strict=True):
        around = situation(sizes, gib=gib)
        settled, made = settle_memory(config, around)
        assert offloaded(settled) == flags
        assert made.fits()
        assert made in [estimate(settled, replace(around, small_blocks=are_small)) for are_small in (False, True)]


@pytest.mark.parametrize("override", ["train.micro_batch_tokens=1000000000", "train.micro_batch_size=64"])
def test_a_microbatch_has_no_more_than_a_rank_has_of_a_batch(sizes: list[ModelSize], override: str) -> None:
    """Bug: the bytes of rows that no batch has, for which weights are offloaded or the run is refused."""
    around = situation(sizes, gib=None, ranks=2)
    all_at_once = configure("train.micro_batch_size=8")
    expected = estimate(all_at_once, around).memories[0].peak
    assert estimate(changed(override), around).memories[0].peak == expected
    assert expected > estimate(configure(), around).memories[0].peak


def test_small_blocks_come_before_offloading(sizes: list[ModelSize]) -> None:
    """Of the memory that small ones need, the 32nd part that large ones take is missing."""
    config = configure()
    smallest = needed(config, sizes, False, False, False)
    tight, ample = (settle_memory(config, situation(sizes, gib=gib)) for gib in (smallest, 1.1 * smallest))

    assert offloaded(tight[0]) == offloaded(ample[0]) == (False, False, False)
    assert tight[1].block_bytes == 256 * 2**20
    assert ample[1].block_bytes == int(1.1 * smallest * GIB) // 32


def test_what_is_set_stays_set(sizes: list[ModelSize]) -> None:
    """Also where the run then fits worse, or nothing would have to be offloaded."""
    config = configure("teachers.0.offload=false", "student.offload=true")
    settled, _ = settle_memory(config, situation(sizes, gib=1000))
    assert offloaded(settled) == (False, False, True)

    settled, _ = settle_memory(config, situation(sizes, gib=needed(config, sizes, False, True, True)))
    assert offloaded(settled) == (False, True, True)


@pytest.mark.parametrize(("device", "gib"), [("cpu", 1e-3), ("cuda", None)])
def test_nothing_is_offloaded_where_it_brings_nothing_or_nobody_knows(
    sizes: list[ModelSize], device: str, gib: float | None
) -> None:
    config = configure()
    settled, _ = settle_memory(config, situation(sizes, gib=gib, device=device))

    assert offloaded(settled) == (False, False, False)


def test_teachers_that_are_not_active_are_decided_too(sizes: list[ModelSize]) -> None:
    """The settings of the workers, and a run's config.yaml, have no `auto` left."""
    config = configure("loss.kd_weight=0")
    around = replace(situation(sizes, gib=80), teachers=())
    settled, made = settle_memory(config, around)

    assert offloaded(settled) == (False, False, False)
    assert {part.owner for part in made.memories[0].parts} == {"student"}


# What is refused


def test_what_fits_nowhere_is_refused_with_figures_and_ways_out(sizes: list[ModelSize]) -> None:
    config = configure()
    with pytest.raises(ConfigError) as caught:
        settle_memory(config, situation(sizes, gib=8, ranks=2))

    told = str(caught.value)
    assert told.startswith(
        "student.offload=auto, teachers.*.offload=auto: with everything offloaded each GPU would have "
    )
    assert "but has 8.0 GiB" in told
    for setting in ("train.micro_batch_size", "train.max_length", "parallelism.tp", "run.dry_run=true"):
        assert setting in told


def test_a_dry_run_shows_what_fits_nowhere(sizes: list[ModelSize]) -> None:
    config = configure("run.dry_run=true")
    settled, made = settle_memory(config, situation(sizes, gib=8))

    assert offloaded(settled) == (True, True, True)
    assert not made.fits()


def test_separate_devices_are_refused_as_they_are(sizes: list[ModelSize]) -> None:
    """Bugs: "with everything offloaded", of a run of which nothing was."""
    config = configure("cluster.placement=separate")
    with pytest.raises(ConfigError) as caught:
        settle_memory(config, situation(sizes, gib=8))
    told = str(caught.value)
    assert "teachers.*.offload=auto: each GPU of the student would have to hold" in told
    assert "with everything offloaded" not in told


def test_who_has_decided_alone_is_not_refused(sizes: list[ModelSize]) -> None:
    """The estimate may be wrong by a fifth, and there has to be a way past it."""
    config = configure("teachers.0.offload=true", "teachers.1.offload=true", "student.offload=true")
    settled, made = settle_memory(config, situation(sizes, gib=8))

    assert offloaded(settled) == (True, True, True)
    assert not made.fits()


def test_main_memory_may_be_what_is_short(sizes: list[ModelSize]) -> None:
    """What is offloaded has to go somewhere."""
    config = configure()
    around = situation(sizes, gib=needed(config, sizes, True, True, True))
    tight = replace(around, machine=replace(around.machine, host_bytes=4 * GIB))

    with pytest.raises(ConfigError, match="main memory for each GPU would have to hold"):
        settle_memory(config, tight)


# What is estimated


def total(made: MemoryEstimate, name: str, phase: Phase) -> int:
    return sum(part.at(phase) for part in made.memories[0].parts if str(part) == name)


def test_processes_that_share_a_gpu_have_a_context_each(sizes: list[ModelSize]) -> None:
    """What one has cached is returned before the next works, so contexts are all that a process adds to its tensors."""
    made = estimate(with_offloads(configure(), False, False, False), situation(sizes, gib=80)).memories[0]
    contexts = {part.owner: part.at(Phase.LOSS) for part in made.parts if part.name == "CUDA"}
    assert list(contexts.values()) == 3 * [CONTEXT_BYTES]


def test_what_is_offloaded_leaves_buffers_alone(sizes: list[ModelSize]) -> None:
    config = with_offloads(configure(), True, True, True)
    gone, host = estimate(config, situation(sizes, gib=80)).memories
    left = {str(part) for part in gone.parts if part.at(Phase.BACKWARD) and part.owner != "student"}

    assert {name.split(": ")[1] for name in left} == {"hidden states handed over", "head handed over", "CUDA"}
    assert {str(part) for part in gone.parts if part.at(Phase.TEACHERS) and part.owner == "student"} == {
        "student: CUDA"
    }
    # The host's copies stay while their models are on the device.
    of_all = 12 * sizes[0].parameters + 2 * (sizes[1].parameters + sizes[2].parameters)
    assert host.total(Phase.TEACHERS) == host.total(Phase.BACKWARD) == of_all


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("offload", [True, False])
def test_no_phase_is_below_its_states(sizes: list[ModelSize], offload: bool, ranks: int) -> None:
    """By plain sums: 4 bytes a weight of the student and 8 of AdamW, 4 of its gradient, and 2 a weight of a teacher."""
    config = with_offloads(configure(), offload, offload, offload)
    gpu, host = estimate(config, situation(sizes, gib=80, ranks=ranks)).memories
    student, *teachers = (size.parameters / ranks for size in sizes)
    of_all, at_work = 2 * sum(teachers), 2 * max(teachers)
    states = {
        Phase.LOADING: 4 * student + of_all,
        Phase.TEACHERS: at_work if offload else 12 * student + of_all,
        Phase.LOSS: 12 * student + (0 if offload else of_all),
        Phase.BACKWARD: 16 * student + (0 if offload else of_all),
    }
    assert all(gpu.total(phase) >= expected for phase, expected in states.items())
    assert host.total(Phase.TEACHERS) >= (12 * student + of_all if offload else 0)


def test_of_layers_that_come_and_go_two_are_there(sizes: list[ModelSize]) -> None:
    """Bug: a streamed teacher counts as whole while it computes, so that the run is refused or others are offloaded."""
    config = with_offloads(configure(), "layers", False, False)
    gpu, host = estimate(config, situation(sizes, gib=80)).memories
    (weights,) = [each for each in gpu.parts if each.owner == config.teachers[0].name and each.name == "parameters"]
    there = numel(sizes[1].rest) + 2 * numel(sizes[1].layers[0].shapes)

    assert weights.at(Phase.TEACHERS) == 2 * there < sizes[1].parameters
    assert weights.at(Phase.BACKWARD) == 0
    assert host.total(Phase.TEACHERS) == host.total(Phase.BACKWARD) == 2 * sizes[1].parameters


def test_a_student_without_logits(sizes: list[ModelSize]) -> None:
    """The head's gradient and a block of rows take the place of twice the logits, whatever the length."""
    whole, headless = (
        estimate(with_offloads(configure(f"handoff={kind}"), False, False, False), situation(sizes, gib=80))
        for kind in ("logits", "hidden_states")
    )
    tokens, vocabulary, width = 4 * 2048, 128_256, 2048

    assert total(whole, "student: logits and their gradients", Phase.LOSS) == 2 * tokens * vocabulary * 2
    assert total(headless, "student: logits and their gradients", Phase.LOSS) == 0
    gradients = vocabulary * width * (4 + 2) + tokens * width * 2
    assert total(headless, "student: gradients of hidden states and head", Phase.LOSS) == gradients
    # Equally many rows of three heads share the budget, a 32nd part of the GPU; the student's have a gradient.
    budget = 80 * GIB // 32
    rows = budget // (4 * sum(size.vocab_size for size in sizes))
    blocks = total(headless, "student: blocks of logits, temporaries of a loss", Phase.LOSS)
    assert blocks == 4 * rows * (sum(size.vocab_size for size in sizes) + vocabulary) + budget
    assert headless.memories[0].peak < whole.memories[0].peak


def test_blocks_on_a_cpu_have_the_rows_of_a_product(sizes: list[ModelSize]) -> None:
    """Bug: the estimate counts 64 MiB, where 128 rows of three large vocabularies take more."""
    config = with_offloads(configure("handoff=hidden_states"), False, False, False)
    blocks = total(
        estimate(config, situation(sizes, gib=None, device="cpu")),
        "student: blocks of logits, temporaries of a loss",
        Phase.LOSS,
    )
    numbers = sum(size.vocab_size for size in sizes) + sizes[0].vocab_size
    assert blocks == 4 * 128 * numbers + 64 * 2**20


def test_teachers_on_their_own_devices(sizes: list[ModelSize]) -> None:
    """Each kind of device has its own peak, and a teacher that is ahead a buffer more."""
    config = configure("cluster.placement=separate")
    settled, made = settle_memory(config, situation(sizes, gib=80))
    student, cross, *_ = made.memories

    assert offloaded(settled) == (False, False, False)
    assert {part.owner for part in student.parts} == {"student"}
    assert {part.owner for part in cross.parts} == {config.teachers[0].name}
    (handed,) = [part for part in cross.parts if part.name == "hidden states handed over"]
    assert handed.at(Phase.TEACHERS) == 2 * 16 * 2048 * 2560 * 2
    copies = [part.at(Phase.LOSS) for part in student.parts if part.name.endswith(", copied")]
    assert copies == [0, 0]


def test_the_students_weights_count_once_and_their_average_in_fp32(sizes: list[ModelSize]) -> None:
    """Bugs: a second copy for a live teacher, an average of the frozen weights, and a process for either."""
    student = sizes[0]
    at = situation([student, student, sizes[2]], gib=80)

    def run(weights: str, *flags: bool, **more: object) -> RunConfig:
        config = configure("student.offload=false", "teachers.1.offload=false", "teachers.0.offload=false")
        own = config.teachers[0].model_copy(update={"model": None, "weights": weights, **more})
        return config.model_copy(update={"teachers": (own, config.teachers[1])})

    live, mean = (estimate(run(weights), at).memories[0] for weights in ("student", "ema"))
    frozen = estimate(run("frozen", model="m"), at).memories[0]
    parameters = sum(part.at(Phase.BACKWARD) for part in live.parts if part.name in ("parameters", "average"))
    assert parameters == (4 + 2) * student.parameters
    for phase in Phase:
        assert mean.total(phase) == live.total(phase) + 4 * student.parameters
    contexts = [sum(part.name == "CUDA" for part in each.parts) for each in (live, mean, frozen)]
    assert contexts == [2, 2, 3]
    away = estimate(run("ema", offload=True), at).memories[0]
    assert away.total(Phase.LOSS) == live.total(Phase.LOSS)
    assert away.total(Phase.TEACHERS) >= live.total(Phase.TEACHERS)


def test_more_ranks_hold_less(sizes: list[ModelSize]) -> None:
    """Parameters and optimizer are cut exactly where rows divide; a microbatch is each rank's own."""
    config = configure()
    one, four = (estimate(config, situation(sizes, gib=80, ranks=ranks)) for ranks in (1, 4))
    for name in ("student: parameters", "student: optimizer", f"{config.teachers[0].name}: parameters"):
        assert total(one, name, Phase.TEACHERS) == 4 * total(four, name, Phase.TEACHERS)
    for name in ("student: gradients of hidden states and head", f"{config.teachers[0].name}: head handed over"):
        assert total(one, name, Phase.LOSS) == total(four, name, Phase.LOSS)


# What is printed


def printed(config: RunConfig, made: MemoryEstimate) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    for shown in memory_report(made, config):
        console.print(shown)
    return console.export_text()


def test_the_report_says_what_is_where_and_when(sizes: list[ModelSize]) -> None:
    config = configure("logging.console.memory_table=true")
    settled, made = settle_memory(config, situation(sizes, gib=needed(config, sizes, True, False, False)))
    told = printed(settled, made)
    rows = {cells[1].strip(): cells[2:] for line in told.splitlines() if len(cells := line.split("│")) > 6}

    optimizer = [cell.strip() for cell in rows["student: optimizer"]]
    assert optimizer[:4] == ["", *([f"{sizes[0].parameters * 8 / 2**20:,.0f}"] * 3)]
    assert f"in main memory while others use the device: {config.teachers[0].name}" in told
    assert "warning" not in told


def test_the_report_is_short_unless_asked_for(sizes: list[ModelSize]) -> None:
    """Bug: sixty lines of parts before the one line that says whether it fits."""
    config = configure()
    told = printed(*settle_memory(config, situation(sizes, gib=80)))
    assert len(told.splitlines()) <= 8
    assert re.search(r"most of it: \w+: [a-z ]+ [\d,]+ MiB", told)


def test_the_report_of_what_does_not_fit(sizes: list[ModelSize]) -> None:
    config = configure("run.dry_run=true", "student.activation_checkpointing=false")
    told = printed(*settle_memory(config, situation(sizes, gib=8)))

    assert "warning: each GPU: " in told
    assert "of 8.0 GiB" in told
    assert "a smaller train.max_length" in told


# What is given back


def test_caches_are_given_back_where_they_do_not_fit(sizes: list[ModelSize]) -> None:
    """Bugs: memory that is asked for again in each step though all fits; a process that keeps what others need.

    What a process holds in its own largest phase it may keep, each teacher what it holds in its turn.
    """
    config = configure()
    together = estimate(config, situation(sizes, gib=None)).memories[0].peak / GIB
    assert not estimate(config, situation(sizes, gib=together / USABLE)).caches_fit
    assert not estimate(config, situation(sizes, gib=None)).caches_fit
    assert estimate(config, situation(sizes, gib=4 * together)).caches_fit


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
def test_who_gives_back(
    device: str, launcher: str, shared: int, caches_fit: bool, server: str | None, expected: bool
) -> None:
    """Bug: an emptied cache where no other process is on the device."""
    overrides = [f"cluster.launcher={launcher}"]
    rollouts = {None: None, "own": ServerRollout(), "on its own GPU": ServerRollout(gpus=1)}
    rollout = rollouts[server] if server in rollouts else ServerRollout(url=server)
    config = configure(*overrides).model_copy(update={"rollout": rollout})
    plan: Any = SimpleNamespace(
        config=config,
        device=device,
        placement=SimpleNamespace(groups_per_device=shared),
        memory=SimpleNamespace(caches_fit=caches_fit),
    )
    assert Plan.empties_cache.fget(plan) is expected  # type: ignore[attr-defined]
