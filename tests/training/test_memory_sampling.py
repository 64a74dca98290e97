"""The estimate for sampling, by the student in rollouts and by a teacher in evaluations, against the bytes alive in
their workers, followed op by op.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
)

from nemo_opd.config import RunConfig
from nemo_opd.config.rollout import ServerRollout
from nemo_opd.distributed.layout import Layout
from nemo_opd.logits.blocks import block_bytes
from nemo_opd.preflight.memory import (
    SAMPLING,
    Machine,
    Memory,
    MemoryEstimate,
    MemoryInputs,
    ModelSetup,
    Phase,
    Rank,
    estimate,
)
from nemo_opd.preflight.memory_choices import server_share
from nemo_opd.preflight.model_info import model_size
from nemo_opd.rollout.engine_interface import Request, Sampling, SamplingBatch, student_batch, teacher_batch
from nemo_opd.workers.student_worker import StudentWorker
from nemo_opd.workers.teacher_worker import TeacherWorker
from tests.composition import compose
from tests.models.world import as_rank
from tests.tiny import Tiny
from tests.training.live_bytes import LiveBytes
from tests.training.test_memory import printed

WITHIN = 0.15
"""Not in the estimate: masks, rotated copies, and FSDP2's temporary copies while it gathers the whole model."""


def shape(width: int, **settings: Any) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "vocab_size": 480,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        **settings,
    }


LLAMA = LlamaConfig(**shape(96, num_hidden_layers=4))
WIDE_KEYS = LlamaConfig(**shape(32, num_hidden_layers=4, head_dim=64, num_key_value_heads=4, vocab_size=64))
MANY_PARAMETERS = LlamaConfig(**shape(256, num_hidden_layers=4))
MANY_LOGITS = LlamaConfig(**shape(16, num_hidden_layers=1, vocab_size=20_000))
EAGER = Gemma2Config(**shape(64, num_hidden_layers=3), sliding_window=16)
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS = Gemma3TextConfig(**shape(32, num_hidden_layers=3, head_dim=64, layer_types=KINDS), sliding_window=6)
FUSED = Phi3Config(**shape(64, num_hidden_layers=2))

CACHE, WORK, GATHERED = "key-value cache", "activations and logits of sampling", "parameters, gathered whole"


@dataclass(frozen=True)
class Case:
    config: PretrainedConfig
    rows: int
    prompt: int
    new: int
    dominant: str
    """The largest part besides the parameters."""
    settings: tuple[str, ...] = ()


ROLLOUTS = {
    "the cache": Case(WIDE_KEYS, 6, 40, 3, CACHE),
    "the cache, sampled": Case(WIDE_KEYS, 24, 4, 8, CACHE),
    "prompts": Case(LLAMA, 6, 96, 3, WORK),
    "prompts in bf16": Case(LLAMA, 6, 96, 3, WORK, ("student.dtype=bfloat16",)),
    "prompts with scores": Case(EAGER, 6, 96, 3, WORK),
    "parameters": Case(MANY_PARAMETERS, 2, 8, 3, GATHERED, ("student.dtype=bfloat16",)),
    "logits": Case(MANY_LOGITS, 12, 6, 3, WORK),
    "logits, warped": Case(MANY_LOGITS, 12, 6, 3, WORK, ("rollout.temperature=0.7", "rollout.top_p=0.9")),
    "logits in bf16": Case(MANY_LOGITS, 12, 6, 3, WORK, ("student.dtype=bfloat16", "rollout.batch_size=5")),
    "windows": Case(WINDOWS, 32, 4, 10, CACHE),
}
WARPED = ("teachers.0.dtype=bfloat16", "evaluation.temperature=0.7", "evaluation.top_p=0.9")
ANSWERS = {
    "the cache": Case(WIDE_KEYS, 6, 40, 3, CACHE),
    "logits in bf16, warped": Case(MANY_LOGITS, 12, 6, 3, WORK, WARPED),
    "parameters": Case(MANY_PARAMETERS, 2, 8, 3, GATHERED),
}
TWO_RANKS = (Layout(2), Layout(1, 1, 2))


def memory_inputs(
    config: RunConfig,
    model: PretrainedConfig,
    layout: Layout,
    device: str = "cpu",
    teachers: Sequence[PretrainedConfig] = (),
) -> MemoryInputs:
    """Return inputs with the same model for student and teachers, unless `teachers` are passed."""
    architectures = [model, *(teachers or [model] * len(config.teachers))]
    setups = [ModelSetup(model_size(architecture), architecture.vocab_size, layout) for architecture in architectures]
    return MemoryInputs(setups[0], tuple(setups[1:]), Machine(device, None, None, layout.size))


def saved(config: PretrainedConfig, folder: Path, tiny: Tiny) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.student).save_pretrained(folder)
    return folder


def requests_of(case: Case, rows: int) -> list[Request]:
    """Return prompts of different lengths."""
    return [Request(np.ones(case.prompt - row % 2, np.int32), case.new, seed=row) for row in range(rows)]


def sampling_config(model: str, folder: Path, case: Case, tp: int = 1) -> RunConfig:
    """Return settings of the student alone, which samples rollouts, or with the teacher that answers."""
    shared = (
        f"{model}.model={folder}",
        f"{model}.parallelism.tp={tp}",
        f"train.max_length={case.prompt + case.new}",
        f"rollout.max_new_tokens={case.new}",
        *case.settings,
    )
    if model != "student":
        return compose(*shared, f"evaluation.teacher_batch_size={case.rows}", config_name="on_policy_demo")
    batch = (f"train.global_batch_size={case.rows}", "train.micro_batch_size=1", "rollout.n=1")
    config = compose("student=demo", "evaluation=null", *batch, *shared, config_name="on_policy_demo")
    return config.model_copy(update={"teachers": ()})


def rollout_peak(case: Case, config: RunConfig, requests: Sequence[Request] = ()) -> int:
    """Return the most bytes in a student worker while it samples; no sequence ends early."""
    rollout = config.rollout
    assert rollout is not None
    student = StudentWorker(
        config,
        projections=[],
        total_steps=1,
        vocab_size=case.config.vocab_size,
        teacher_vocab_sizes=[],
        device="cpu",
        transport="shared_memory",
        block_bytes=block_bytes("cpu"),
    )
    rows = case.rows // (dist.get_world_size() // config.student.parallelism.tp)
    sampling, batch = Sampling(rollout.temperature, rollout.top_p, rollout.top_k), student_batch(config, 1)
    assert batch is not None
    with LiveBytes(*student.model.parameters()) as live:
        student.generate(requests or requests_of(case, rows), sampling, 0, batch.limit)
    student.close()
    return live.peak


def answer_peak(case: Case, config: RunConfig) -> int:
    """Return the most bytes in a teacher worker while it answers; no answer ends early."""
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
        teacher.generate(requests_of(case, 2 * case.rows), sampling, (), batch.limit)
    teacher.close()
    return live.peak


def sampling_parts(memory: Memory, owner: str, phase: Phase) -> dict[str, int]:
    """Return the parts of a model, without the optimizer's state and buffers, which exist only after the first step."""
    parts = (part for part in memory.parts if part.owner == owner and part.name != "optimizer")
    return {part.name: part.at(phase) for part in parts if not part.name.endswith("handed over")}


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    with as_rank(0, request.param):
        yield request.param


@pytest.mark.parametrize(
    ("model", "name", "world", "layout"),
    [
        *[("student", name, 1, Layout(1)) for name in ROLLOUTS],
        *[("student", name, 2, layout) for name in ("the cache", "parameters") for layout in TWO_RANKS],
        *[("teachers.0", name, 1, Layout(1)) for name in ("the cache", "logits in bf16, warped")],
        *[("teachers.0", "parameters", 2, layout) for layout in TWO_RANKS],
    ],
    ids=str,
    indirect=["world"],
)
def test_sampling_holds_the_estimated_bytes(
    model: str, name: str, world: int, layout: Layout, tiny: Tiny, tmp_path: Path
) -> None:
    """Bugs: prompts' logits at all positions; a cache that grows in place; logits of one dtype; a window's cache that
    keeps all tokens; shards that are not gathered; tensor-parallel ranks with the keys and values of all heads; a
    teacher with the student's dtype or batch, or with all questions in one batch.

    Each part is the largest in one of the cases.
    """
    is_rollout = model == "student"
    case = (ROLLOUTS if is_rollout else ANSWERS)[name]
    config = sampling_config(model, saved(case.config, tmp_path, tiny), case, layout.tp)
    (memory,) = estimate(config, memory_inputs(config, case.config, layout)).memories
    parts = sampling_parts(memory, *(("student", Phase.ROLLOUT) if is_rollout else ("same", Phase.ANSWERS)))

    assert max(parts.keys() - {"parameters"}, key=parts.__getitem__) == case.dominant
    peak = rollout_peak(case, config) if is_rollout else answer_peak(case, config)
    assert sum(parts.values()) == pytest.approx(peak, rel=WITHIN)


@pytest.mark.parametrize("world", [1], indirect=True)
def test_a_benchmarks_longest_question_is_counted(world: int, tiny: Tiny, tmp_path: Path) -> None:
    """Bug: as many long questions in a batch as rollouts, or no estimate for a question longer than a whole batch."""
    case, longest = ROLLOUTS["the cache"], 900
    config = sampling_config("student", saved(case.config, tmp_path, tiny), case)
    inputs = memory_inputs(config, case.config, Layout(world))
    with_benchmark = replace(inputs, student=replace(inputs.student, longest_question=longest))
    short, counted = (
        sum(sampling_parts(estimate(config, setting).memories[0], "student", Phase.ROLLOUT).values())
        for setting in (inputs, with_benchmark)
    )
    questions = [Request(np.ones(longest - 3, np.int32), 3, seed) for seed in range(2)]

    batch = student_batch(config, 1)
    assert batch is not None
    assert batch.limit.tokens == case.rows * (case.prompt + case.new) < longest
    assert counted > 1.5 * short
    assert counted == pytest.approx(rollout_peak(case, config, questions), rel=WITHIN)


@pytest.mark.parametrize("model", [LLAMA, FUSED, EAGER, WINDOWS], ids=lambda model: model.model_type)
def test_the_cache_has_the_size_of_transformers(model: PretrainedConfig) -> None:
    """Equal to the byte, after the prompts and at the end. Bug: windows that are cut while a prompt is read."""
    rows, prompt, new = 3, 24, 6
    rank = Rank(compose().student, ModelSetup(model_size(model), model.vocab_size, Layout(1)), "cpu")
    network = AutoModelForCausalLM.from_config(model).eval()
    ids = torch.ones(rows, prompt, dtype=torch.long)
    with torch.no_grad():
        cache = network(ids, use_cache=True).past_key_values
        assert stored(cache) == rank.cache(rows, prompt, is_read=False)
        for _ in range(new - 1):
            cache = network(ids[:, :1], past_key_values=cache, use_cache=True).past_key_values
    assert stored(cache) == rank.cache(rows, prompt + new - 1)


def stored(cache: Any) -> int:
    return sum(tensor.untyped_storage().nbytes() for layer in cache.layers for tensor in (layer.keys, layer.values))


# Size of a batch

BATCH = (
    "train.global_batch_size=96",
    "train.max_length=100",
    "rollout.max_new_tokens=30",
    "train.micro_batch_size=1",
    "logging.console.memory_table=true",
)
ALONE = "evaluation=null"
TURNS = ("environment=calculator", "data.messages_key=messages", "data.response_key=null")
QUESTIONS = ("evaluation.teacher_batch_size=8", "evaluation.max_new_tokens=50", "evaluation.temperature=0.6")
CROSS = ("teachers.0.type=cross_tokenizer", "teachers.0.max_length=200", "loss=p_kl")


@pytest.mark.parametrize(
    ("settings", "dp", "expected"),
    [
        ((ALONE,), 1, SamplingBatch(64, 70, 30)),
        ((ALONE,), 4, SamplingBatch(24, 70, 30)),
        ((ALONE, "rollout.batch_size=8"), 4, SamplingBatch(8, 70, 30)),
        ((ALONE, "rollout.max_prompt_length=40"), 4, SamplingBatch(24, 40, 30)),
        ((ALONE, *TURNS), 4, SamplingBatch(24, 99, 30)),
        (QUESTIONS, 4, SamplingBatch(64, 70, 50)),
    ],
    ids=str,
)
def test_the_students_batch(settings: tuple[str, ...], dp: int, expected: SamplingBatch) -> None:
    """Bugs: more rows than a rank has rollouts; a later turn's prompt without the earlier turns; questions of the
    evaluation that do not count.
    """
    assert student_batch(compose(*BATCH, *settings, config_name="on_policy_demo"), dp) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("rollout.max_prompt_length=40", *QUESTIONS), SamplingBatch(8, 40, 50)),
        (("rollout.batch_size=3", "rollout.temperature=0.5", *CROSS), SamplingBatch(64, 140, 30)),
        (TURNS, SamplingBatch(64, 99, 30)),
    ],
    ids=["questions", "cross", "turns"],
)
def test_a_teachers_batch(settings: tuple[str, ...], expected: SamplingBatch) -> None:
    """Bugs: settings of rollouts in place of the evaluation's, or a question's length in the student's tokens."""
    config = compose(*BATCH, *settings, config_name="on_policy_demo")
    assert teacher_batch(config, config.teachers[0]) == expected


# Other parts while a model samples


def at(memory: Memory, phase: Phase) -> dict[str, int]:
    return {str(part): part.at(phase) for part in memory.parts}


def on_gpu(*settings: str) -> tuple[RunConfig, MemoryEstimate]:
    config = compose(*BATCH, *settings, config_name="on_policy_demo")
    return config, estimate(config, memory_inputs(config, LLAMA, Layout(2), "cuda"))


@pytest.mark.parametrize("offload", [True, False])
def test_memory_while_the_student_samples(offload: bool) -> None:
    """Bug: the student's weights are offloaded; optimizer and teachers on the device although they are offloaded."""
    _, estimated = on_gpu(f"student.offload={offload}", f"teachers.0.offload={offload}")
    device, host = (at(memory, Phase.ROLLOUT) for memory in estimated.memories)
    (teacher,) = {part.owner for part in estimated.memories[0].parts} - {"student"}
    optimizer = 8 * model_size(LLAMA).parameters // 2

    assert device["student: parameters"] == pytest.approx(optimizer / 2, rel=0.02)
    assert device["student: parameters, gathered whole"] == 2 * model_size(LLAMA).parameters
    assert (device["student: optimizer"], device[f"{teacher}: parameters"]) == pytest.approx(
        (0, 0) if offload else (optimizer, optimizer / 2), rel=0.02
    )
    if offload:
        # Weights in use keep their copy on the host.
        assert host["student: parameters, optimizer"] == pytest.approx(optimizer + optimizer / 2, rel=0.02)
        assert host[f"{teacher}: parameters"] == pytest.approx(optimizer / 2, rel=0.02)


def test_a_rollout_may_be_the_peak() -> None:
    """Bug: rollouts do not count when the estimate decides what to offload."""
    _, estimated = on_gpu("rollout.batch_size=4096", "train.global_batch_size=65536")
    assert estimated.memories[0].peak_phase is Phase.ROLLOUT


@pytest.mark.parametrize("sleep", [True, False])
def test_a_server_on_the_same_gpu_has_the_memory_that_training_leaves(sleep: bool) -> None:
    """Bug: the server's share counts nowhere, or in full while a sleeping server has only a part of it."""
    config = compose(*BATCH, "rollout=server", f"rollout.sleep={sleep}", config_name="on_policy_demo")
    elsewhere = config.model_copy(update={"rollout": ServerRollout(gpus=1)})
    machine = Machine("cuda", 8 * 2**30, None, 2)
    inputs = replace(memory_inputs(config, MANY_LOGITS, Layout(2), "cuda"), machine=machine)
    without, estimated = estimate(elsewhere, inputs), estimate(config, inputs)
    share = server_share(config, estimated, machine)

    def added(phase: Phase) -> float:
        return (estimated.memories[0].total(phase) - without.memories[0].total(phase)) / 2**30

    assert added(Phase.ROLLOUT) == pytest.approx(0.3 * 8)
    assert added(Phase.LOSS) == pytest.approx(2 if sleep else 0.3 * 8)
    assert added(Phase.LOADING) == 0
    training = without.memories[0].total(Phase.ROLLOUT) if sleep else without.memories[0].peak
    assert share is not None
    assert 0.94 <= share + training / (8 * 2**30) <= 0.95
    assert "rollout server: its share" in printed(config, estimated)
    assert server_share(elsewhere, without, machine) is None


def test_the_report_has_a_column_for_rollouts() -> None:
    """Bugs: a column for rollouts on a server, or no word about a local server that is not counted."""
    workers, server = (printed(*on_gpu(setting)) for setting in ("rollout=hf", "rollout=server"))
    remote = printed(*on_gpu("rollout=server", "rollout.url=http://localhost:8000"))

    assert "rollout" in workers.split("teachers")[0]
    assert "student: key-value cache" in workers
    assert "not counted" not in workers
    assert "rollout" not in server.split("teachers")[0]
    assert "not counted: the server that samples" in server
    assert "not counted" not in remote


@cache
def two_teachers(*settings: str) -> RunConfig:
    return compose(
        *BATCH, "teachers=demo_multi", "loss=p_kl", "teachers.0.max_length=100", *settings, config_name="on_policy_demo"
    )


@cache
def two_gpus() -> MemoryInputs:
    """Return inputs for two teachers: one with wide keys and few parameters, and one with many parameters."""
    return memory_inputs(two_teachers(), LLAMA, Layout(2), "cuda", [WIDE_KEYS, MANY_PARAMETERS])


def changed(config: RunConfig, key: str, **update: object) -> RunConfig:
    return config.model_copy(update={key: getattr(config, key).model_copy(update=update)})


def answering(memory: Memory) -> set[str]:
    return {part.owner for part in memory.parts if part.name in SAMPLING and part.at(Phase.ANSWERS)}


@pytest.mark.parametrize(("settings", "largest"), [((), "same"), (("teachers.0.max_length=1000",), "cross")])
def test_colocated_teachers_answer_one_after_another(settings: tuple[str, ...], largest: str) -> None:
    """Bug: the sum of all teachers counts, or the first, not the one with most parameters or longest questions."""
    assert answering(estimate(two_teachers(*settings), two_gpus()).memories[0]) == {largest}


def test_separate_teachers_all_answer() -> None:
    config = changed(two_teachers(), "cluster", placement="separate")
    assert [answering(memory) for memory in estimate(config, two_gpus()).memories] == [
        set(),
        {"cross"},
        {"same"},
        set(),
    ]


@pytest.mark.parametrize("offload", [True, False])
def test_memory_while_a_teacher_answers(offload: bool) -> None:
    """Bug: with offloading, weights of other models on the device; or an optimizer's state before the first step."""
    config = two_teachers(*(f"{key}.offload={offload}" for key in ("student", "teachers.0", "teachers.1")))
    device, host = (at(memory, Phase.ANSWERS) for memory in estimate(config, two_gpus()).memories)
    student, waiting = (setup.size.parameters // 2 for setup in (two_gpus().student, two_gpus().teachers[0]))
    there, away = (host, device) if offload else (device, host)

    assert there["cross: parameters"] == pytest.approx(4 * waiting, rel=0.02)
    num_bytes, name = (12, "student: parameters, optimizer") if offload else (4, "student: parameters")
    assert there[name] == num_bytes * student
    assert not away.get("cross: parameters")
    # Weights in use keep their copy on the host.
    assert device["same: parameters"] > 0
    assert host.get("same: parameters", 0) == pytest.approx(device["same: parameters"] if offload else 0, rel=0.02)
    assert device["student: optimizer"] == 0
    assert device["cross: gathered parameters"] == 0
    assert device["cross: hidden states handed over"] == 48 * 100 * WIDE_KEYS.hidden_size * 4


def test_without_questions_for_teachers_no_answers_are_estimated() -> None:
    """Bug: a column for answers although only the student is asked, or answers that change another phase."""
    config = two_teachers()
    student_only = changed(config, "evaluation", teachers=False)
    with_answers, without = estimate(config, two_gpus()), estimate(student_only, two_gpus())

    assert "answers" in printed(config, with_answers)
    assert "answers" not in printed(student_only, without)
    for first, second in zip(with_answers.memories, without.memories, strict=True):
        assert all(first.total(phase) == second.total(phase) for phase in Phase if phase is not Phase.ANSWERS)
