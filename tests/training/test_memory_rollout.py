"""The estimate of rollouts in the student's own workers, against what is alive while one samples, op by op."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, Phi3Config, PretrainedConfig

from nemo_opd.config import RunConfig
from nemo_opd.config.rollout import ServerRollout
from nemo_opd.distributed.layout import Layout
from nemo_opd.logits.blocks import block_bytes
from nemo_opd.preflight.memory import Machine, Memory, MemoryEstimate, ModelSetup, Phase, Rank, estimate
from nemo_opd.preflight.memory_choices import server_share
from nemo_opd.preflight.model_info import model_size
from nemo_opd.rollout.requests import Request, Sampling, SamplingBatch, student_batch
from nemo_opd.workers.student_worker import StudentWorker
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
    shape,
    situation,
)

EAGER = Gemma2Config(**shape(64, num_hidden_layers=3), sliding_window=16)
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS = Gemma3TextConfig(**shape(32, num_hidden_layers=3, head_dim=64, layer_types=KINDS), sliding_window=6)
FUSED = Phi3Config(**shape(64, num_hidden_layers=2))
CASES = {
    "the cache": Case(WIDE_KEYS, 6, 40, 3, "key-value cache"),
    "the cache, sampled": Case(WIDE_KEYS, 24, 4, 8, "key-value cache"),
    "prompts": Case(LLAMA, 6, 96, 3, "activations and logits of sampling"),
    "prompts in bf16": Case(LLAMA, 6, 96, 3, "activations and logits of sampling", ("student.dtype=bfloat16",)),
    "prompts with scores": Case(EAGER, 6, 96, 3, "activations and logits of sampling"),
    "parameters": Case(MANY_PARAMETERS, 2, 8, 3, "parameters, gathered whole", ("student.dtype=bfloat16",)),
    "logits": Case(MANY_LOGITS, 12, 6, 3, "activations and logits of sampling"),
    "logits, warped": Case(
        MANY_LOGITS, 12, 6, 3, "activations and logits of sampling", ("rollout.temperature=0.7", "rollout.top_p=0.9")
    ),
    "logits in bf16": Case(
        MANY_LOGITS, 12, 6, 3, "activations and logits of sampling", ("student.dtype=bfloat16", "rollout.batch_size=5")
    ),
    "windows": Case(WINDOWS, 32, 4, 10, "key-value cache"),
}


def configured(case: Case, *more: str) -> RunConfig:
    """The student alone."""
    config = compose(
        "student=demo",
        "evaluation=null",
        f"train.global_batch_size={case.rows}",
        "train.micro_batch_size=1",
        f"train.max_length={case.prompt + case.new}",
        "rollout.n=1",
        f"rollout.max_new_tokens={case.new}",
        *case.settings,
        *more,
        config_name="on_policy_demo",
    )
    return config.model_copy(update={"teachers": ()})


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    with as_rank(0, request.param):
        yield request.param


def held(case: Case, config: RunConfig, asked: Sequence[Request] = ()) -> int:
    """The most that a worker holds in a rollout of the longest prompts; no sequence ends before its time."""
    model, rollout = case.config, config.rollout
    assert rollout is not None
    student = StudentWorker(
        config,
        projections=[],
        total_steps=1,
        vocab_size=model.vocab_size,
        teacher_vocab_sizes=[],
        device="cpu",
        transport="shared_memory",
        block_bytes=block_bytes("cpu"),
    )
    rows = case.rows // (dist.get_world_size() // config.student.parallelism.tp)
    sampling, batch = Sampling(rollout.temperature, rollout.top_p, rollout.top_k), student_batch(config, 1)
    assert batch is not None
    with LiveBytes(*student.model.parameters()) as live:
        student.generate(asked or requests(case, rows), sampling, 0, batch.limit)
    student.close()
    return live.peak


@pytest.mark.parametrize("world", [1], indirect=True)
def test_a_benchmarks_longest_question_is_counted(world: int, tiny: Tiny, tmp_path: Path) -> None:
    """Bug: as many long questions at a time as there are rollouts, or a single one that is longer than all rollouts
    of a batch and not in the estimate.
    """
    case, long = CASES["the cache"], 900
    config = configured(case, f"student.model={saved(case.config, tmp_path, tiny)}")
    around = situation(config, case.config, Layout(world))
    asked = replace(around, student=replace(around.student, longest_question=long))
    short, counted = (sum(rollout_parts(estimate(config, each).memories[0]).values()) for each in (around, asked))
    questions = [Request(np.ones(long - 3, np.int32), 3, seed) for seed in range(2)]

    batch = student_batch(config, 1)
    assert batch is not None
    assert batch.limit.tokens == case.rows * (case.prompt + case.new) < long
    assert counted > 1.5 * short
    assert counted == pytest.approx(held(case, config, questions), rel=WITHIN)


def rollout_parts(memory: Memory) -> dict[str, int]:
    """All but what other work has left."""
    return {part.name: part.at(Phase.ROLLOUT) for part in memory.parts if part.name != "optimizer"}


@pytest.mark.parametrize("world", [1], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_a_rollout_holds_what_was_estimated(name: str, world: int, tiny: Tiny, tmp_path: Path) -> None:
    """Where each part is the largest in turn. Bugs: prompts' logits at all positions, a cache that grows in place, the
    logits of one kind, a window that is kept whole.
    """
    case = CASES[name]
    config = configured(case, f"student.model={saved(case.config, tmp_path, tiny)}")
    (memory,) = estimate(config, situation(config, case.config, Layout(world))).memories
    parts = rollout_parts(memory)

    assert max((part for part in parts if part != "parameters"), key=parts.__getitem__) == case.dominant
    assert sum(parts.values()) == pytest.approx(held(case, config), rel=WITHIN)


@pytest.mark.parametrize("world", [2], indirect=True)
@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 1, 2)], ids=str)
@pytest.mark.parametrize("name", ["the cache", "parameters"])
def test_ranks_hold_what_was_estimated(name: str, layout: Layout, world: int, tiny: Tiny, tmp_path: Path) -> None:
    """Shards become whole over FSDP2, and keep to their tensor-parallel rank, with its keys and values."""
    case = CASES[name]
    folder = saved(case.config, tmp_path, tiny)
    config = configured(case, f"student.model={folder}", f"student.parallelism.tp={layout.tp}")
    (memory,) = estimate(config, situation(config, case.config, layout)).memories

    assert sum(rollout_parts(memory).values()) == pytest.approx(held(case, config), rel=WITHIN)


@pytest.mark.parametrize("model", [LLAMA, FUSED, EAGER, WINDOWS], ids=lambda model: model.model_type)
def test_the_cache_is_that_of_transformers(model: PretrainedConfig) -> None:
    """Its tensors to the byte, after the prompts and at the end. Bug: windows that are cut while a prompt is read."""
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


# What is sampled at a time


@pytest.mark.parametrize(
    ("settings", "dp", "rows", "prompt", "new"),
    [
        ((), 1, 64, 70, 30),
        ((), 4, 24, 70, 30),
        (("rollout.batch_size=8",), 4, 8, 70, 30),
        (("rollout.max_prompt_length=40",), 4, 24, 40, 30),
        (("environment=calculator", "data.messages_key=messages", "data.response_key=null"), 4, 24, 99, 30),
    ],
    ids=str,
)
def test_what_is_sampled_at_a_time(settings: tuple[str, ...], dp: int, rows: int, prompt: int, new: int) -> None:
    """A batch has no more than a rank's rollouts; a later turn's prompt is all that was said before."""
    config = compose(*BATCH, "evaluation=null", *settings, config_name="on_policy_demo")
    assert student_batch(config, dp) == SamplingBatch(rows, prompt, new)


def test_questions_are_sampled_too() -> None:
    """As many as there is room for at a time, in their own way. Bug: only the batches that are learned from."""
    settings = ("evaluation.max_new_tokens=50", "evaluation.temperature=0.6")
    config = compose(*BATCH, *settings, config_name="on_policy_demo")
    assert student_batch(config, 4) == SamplingBatch(64, 70, 50)


# Beside the rollout


def on_gpu(*settings: str) -> tuple[RunConfig, MemoryEstimate]:
    config = compose(*BATCH, *settings, config_name="on_policy_demo")
    return config, estimate(config, situation(config, LLAMA, Layout(2), "cuda"))


@pytest.mark.parametrize("offload", [True, False])
def test_what_is_on_the_device_meanwhile(offload: bool) -> None:
    """The weights in any case, the optimizer and the teachers unless they are offloaded."""
    _, made = on_gpu(f"student.offload={offload}", f"teachers.0.offload={offload}")
    device, host = ({str(part): part.at(Phase.ROLLOUT) for part in memory.parts} for memory in made.memories)
    (teacher,) = {part.owner for part in made.memories[0].parts} - {"student"}
    optimizer = 8 * model_size(LLAMA).parameters // 2

    assert device["student: parameters"] == pytest.approx(optimizer / 2, rel=0.02)
    assert device["student: parameters, gathered whole"] == 2 * model_size(LLAMA).parameters
    assert (device["student: optimizer"], device[f"{teacher}: parameters"]) == pytest.approx(
        (0, 0) if offload else (optimizer, optimizer / 2), rel=0.02
    )
    if offload:
        # Weights in use leave their copy where it is.
        assert host["student: parameters, optimizer"] == pytest.approx(optimizer + optimizer / 2, rel=0.02)
        assert host[f"{teacher}: parameters"] == pytest.approx(optimizer / 2, rel=0.02)


def test_rollouts_decide_what_is_offloaded() -> None:
    """Bug: an estimate whose peak never is a rollout's."""
    _, made = on_gpu("rollout.batch_size=4096", "train.global_batch_size=65536")
    assert made.memories[0].peak_phase is Phase.ROLLOUT


@pytest.mark.parametrize("sleep", [True, False])
def test_a_server_on_the_same_gpu_has_what_the_training_leaves(sleep: bool) -> None:
    """While the student samples, where the server sleeps otherwise. Bug: a share that is counted nowhere."""
    config = compose(*BATCH, "rollout=server", f"rollout.sleep={sleep}", config_name="on_policy_demo")
    machine = Machine("cuda", 8 * 2**30, None, 2)
    around = replace(situation(config, MANY_LOGITS, Layout(2), "cuda"), machine=machine)
    without = estimate(config.model_copy(update={"rollout": ServerRollout(gpus=1)}), around)
    made = estimate(config, around)
    share = server_share(config, made, machine)

    def added(phase: Phase) -> float:
        return (made.memories[0].total(phase) - without.memories[0].total(phase)) / 2**30

    assert added(Phase.ROLLOUT) == pytest.approx(0.3 * 8)
    assert added(Phase.LOSS) == pytest.approx(2 if sleep else 0.3 * 8)
    assert added(Phase.LOADING) == 0
    others = without.memories[0].total(Phase.ROLLOUT) if sleep else without.memories[0].peak
    assert share is not None
    assert 0.94 <= share + others / (8 * 2**30) <= 0.95
    assert "rollout server: its share" in printed(config, made)
    assert server_share(config.model_copy(update={"rollout": ServerRollout(gpus=1)}), without, machine) is None


def test_the_report_has_a_column_where_there_are_rollouts() -> None:
    """Of a server where it is counted: not where the machine's memory is unknown."""
    own, served = (printed(*on_gpu(settings)) for settings in ("rollout=hf", "rollout=server"))
    elsewhere = printed(*on_gpu("rollout=server", "rollout.url=http://localhost:8000"))

    assert "rollout" in own.split("teachers")[0]
    assert "student: key-value cache" in own
    assert "not counted" not in own
    assert "rollout" not in served.split("teachers")[0]
    assert "not counted: the server that samples" in served
    assert "not counted" not in elsewhere
