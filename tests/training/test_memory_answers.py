"""The estimate of a teacher that answers the evaluation's questions, against what is alive while one does."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from nemo_opd.config import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.preflight.memory import SAMPLING, Memory, MemoryInputs, Phase, estimate
from nemo_opd.rollout.requests import Sampling, SamplingBatch, teacher_batch
from nemo_opd.workers.teacher_worker import TeacherWorker
from tests.composition import compose
from tests.models.world import as_rank
from tests.tiny import Tiny
from tests.training.live_bytes import LiveBytes
from tests.training.sampling_memory import (
    BATCH,
    LLAMA,
    MANY_LOGITS,
    MANY_PARAMETERS,
    WIDE_KEYS,
    WITHIN,
    Case,
    printed,
    requests,
    saved,
    situation,
)

WARPED = ("teachers.0.dtype=bfloat16", "evaluation.temperature=0.7", "evaluation.top_p=0.9")
CASES = {
    "the cache": Case(WIDE_KEYS, 6, 40, 3, "key-value cache"),
    "logits in bf16, warped": Case(MANY_LOGITS, 12, 6, 3, "activations and logits of sampling", WARPED),
    "parameters": Case(MANY_PARAMETERS, 2, 8, 3, "parameters, gathered whole"),
}


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    with as_rank(0, request.param):
        yield request.param


def configured(case: Case, *more: str) -> RunConfig:
    return compose(
        f"train.max_length={case.prompt + case.new}",
        f"rollout.max_new_tokens={case.new}",
        f"evaluation.teacher_batch_size={case.rows}",
        *case.settings,
        *more,
        config_name="on_policy_demo",
    )


def held(case: Case, config: RunConfig) -> int:
    """The most that a teacher's worker holds while it answers; no answer ends before its time."""
    (settings,), questions = config.teachers, config.evaluation
    assert questions is not None
    teacher = TeacherWorker(
        settings,
        key="teachers.0.model",
        vocab_size=case.config.vocab_size,
        device="cpu",
        transport="shared_memory",
        handoff="hidden_states",
    )
    sampling, batch = Sampling(questions.temperature, questions.top_p, questions.top_k), teacher_batch(config, settings)
    assert batch is not None
    with LiveBytes(*teacher.model.parameters()) as live:
        teacher.generate(requests(case, 2 * case.rows), sampling, (), batch.limit)
    teacher.close()
    return live.peak


def of_teacher(memory: Memory, owner: str = "same") -> dict[str, int]:
    """All but the buffers, which are there from the first batch on and counted from the answers on."""
    parts = (part for part in memory.parts if part.owner == owner and not part.name.endswith("handed over"))
    return {part.name: part.at(Phase.ANSWERS) for part in parts}


@pytest.mark.parametrize(
    ("name", "world", "layout"),
    [
        ("the cache", 1, Layout(1)),
        ("logits in bf16, warped", 1, Layout(1)),
        ("parameters", 2, Layout(2)),
        ("parameters", 2, Layout(1, 1, 2)),
    ],
    ids=str,
    indirect=["world"],
)
def test_answers_hold_what_was_estimated(name: str, layout: Layout, world: int, tiny: Tiny, tmp_path: Path) -> None:
    """Bugs: a teacher whose shards stay shards, the student's precision or batch, questions all at a time."""
    case = CASES[name]
    folder = saved(case.config, tmp_path, tiny)
    config = configured(case, f"teachers.0.model={folder}", f"teachers.0.parallelism.tp={layout.tp}")
    (memory,) = estimate(config, situation(config, case.config, layout)).memories
    parts = of_teacher(memory)

    assert max((part for part in parts if part != "parameters"), key=parts.__getitem__) == case.dominant
    assert sum(parts.values()) == pytest.approx(held(case, config), rel=WITHIN)


# What is answered at a time


@cache
def two_teachers(*settings: str) -> RunConfig:
    return compose(
        *BATCH, "teachers=demo_multi", "loss=p_kl", "teachers.0.max_length=100", *settings, config_name="on_policy_demo"
    )


@cache
def around() -> MemoryInputs:
    """Two GPUs and two teachers: one with wide keys and few parameters, and one with many parameters."""
    return situation(two_teachers(), LLAMA, Layout(2), "cuda", [WIDE_KEYS, MANY_PARAMETERS])


QUESTIONS = ("evaluation.teacher_batch_size=8", "evaluation.max_new_tokens=50", "evaluation.temperature=0.6")
CROSS = ("teachers.0.type=cross_tokenizer", "teachers.0.max_length=200", "loss=p_kl")
TURNS = ("environment=calculator", "data.messages_key=messages", "data.response_key=null")


@pytest.mark.parametrize(
    ("settings", "drawing"),
    [
        (("rollout.max_prompt_length=40", *QUESTIONS), SamplingBatch(8, 40, 50)),
        (("rollout.batch_size=3", "rollout.temperature=0.5", *CROSS), SamplingBatch(64, 140, 30)),
        (TURNS, SamplingBatch(64, 99, 30)),
    ],
    ids=["questions", "cross", "turns"],
)
def test_what_is_answered_at_a_time(settings: tuple[str, ...], drawing: SamplingBatch) -> None:
    """Bugs: how rollouts are sampled in place of how questions are, or the student's length of a question."""
    config = compose(*BATCH, *settings, config_name="on_policy_demo")
    assert teacher_batch(config, config.teachers[0]) == drawing


# Beside it


def changed(config: RunConfig, key: str, **update: object) -> RunConfig:
    return config.model_copy(update={key: getattr(config, key).model_copy(update=update)})


def at(memory: Memory) -> dict[str, int]:
    return {str(part): part.at(Phase.ANSWERS) for part in memory.parts}


def answering(memory: Memory) -> set[str]:
    return {part.owner for part in memory.parts if part.name in SAMPLING and part.at(Phase.ANSWERS)}


@pytest.mark.parametrize(("settings", "most"), [((), "same"), (("teachers.0.max_length=1000",), "cross")])
def test_teachers_on_one_device_answer_one_after_the_other(settings: tuple[str, ...], most: str) -> None:
    """The one that needs most is told: of many parameters, or of long questions. Bug: the sum of all, or the first."""
    assert answering(estimate(two_teachers(*settings), around()).memories[0]) == {most}


def test_teachers_on_devices_of_their_own_are_all_told() -> None:
    config = changed(two_teachers(), "cluster", placement="separate")
    assert [answering(memory) for memory in estimate(config, around()).memories] == [set(), {"cross"}, {"same"}, set()]


@pytest.mark.parametrize("offload", [True, False])
def test_what_is_on_the_device_meanwhile(offload: bool) -> None:
    """The weights of all, or with offloading of the one that answers; there is no optimizer's state yet."""
    config = two_teachers(*(f"{key}.offload={offload}" for key in ("student", "teachers.0", "teachers.1")))
    device, host = map(at, estimate(config, around()).memories)
    student, waiting = (setup.size.parameters // 2 for setup in (around().student, around().teachers[0]))
    there, away = (host, device) if offload else (device, host)

    assert there["cross: parameters"] == pytest.approx(4 * waiting, rel=0.02)
    held = (12, "student: parameters, optimizer") if offload else (4, "student: parameters")
    assert there[held[1]] == held[0] * student
    assert not away.get("cross: parameters")
    # Weights in use leave their copy where it is.
    assert device["same: parameters"] > 0
    assert host.get("same: parameters", 0) == pytest.approx(device["same: parameters"] if offload else 0, rel=0.02)
    assert device["student: optimizer"] == 0
    assert device["cross: gathered parameters"] == 0
    assert device["cross: hidden states handed over"] == 48 * 100 * WIDE_KEYS.hidden_size * 4


def test_nothing_is_told_where_no_teacher_is_asked() -> None:
    """Neither of the phase nor in the others."""
    asked = two_teachers()
    silent = changed(asked, "evaluation", teachers=False)
    with_answers, without = estimate(asked, around()), estimate(silent, around())

    assert "answers" in printed(asked, with_answers)
    assert "answers" not in printed(silent, without)
    for one, other in zip(with_answers.memories, without.memories, strict=True):
        assert all(one.total(phase) == other.total(phase) for phase in Phase if phase is not Phase.ANSWERS)
