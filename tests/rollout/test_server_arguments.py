"""Options of servers that are started, and the tables of programs and engines."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from nemo_opd.config.rollout import Rollouts, ServerRollout
from nemo_opd.rollout.base import EngineSpec
from nemo_opd.rollout.engines import ENGINES
from nemo_opd.rollout.installed import REQUIREMENTS
from nemo_opd.rollout.server.engine import PROGRAMS
from nemo_opd.rollout.server.program import Program
from nemo_opd.rollout.server.sglang import SGLang
from nemo_opd.rollout.server.share import default_share
from nemo_opd.rollout.server.vllm import VLLM

SPEC = EngineSpec(8, frozenset(), "bfloat16", Path())


def options(program: Program, **changes: Any) -> list[str]:
    spec = replace(SPEC, **changes)
    return program.arguments("m", spec, 1, 0.3)


@pytest.mark.parametrize(
    ("program", "option"),
    [(SGLang(), ["--enable-fp32-lm-head"]), (VLLM(), ["--hf-overrides", '{"head_dtype": "float32"}'])],
    ids=["sglang", "vllm"],
)
def test_logits_are_rounded_where_the_trainers_are(program: Program, option: list[str]) -> None:
    """Bug: one of two that are compared rounds, which is worse than if both do."""
    rounded, whole = (options(program, rounds_logits=rounds) for rounds in (True, False))
    assert [each for each in whole if each not in rounded] == option
    assert [each for each in whole if each in rounded] == rounded


@pytest.mark.parametrize(
    ("program", "option"),
    [(SGLang(), "--mem-fraction-static"), (VLLM(), "--gpu-memory-utilization")],
    ids=["sglang", "vllm"],
)
def test_memory_is_left_to_the_training(program: Program, option: str) -> None:
    """Bug: a server that takes nine tenths of a machine or a GPU on which a student is already."""
    assert options(program)[options(program).index(option) + 1] == "0.3"


@pytest.mark.parametrize(
    ("has_gpu", "settings", "is_training", "left", "share"),
    [
        (False, {}, True, None, 0.3),
        (False, {}, False, None, 0.3),
        (True, {}, True, None, 0.3),
        (True, {}, True, 0.55, 0.55),
        (True, {}, False, None, 0.9),
        (True, {"environment": {"CUDA_VISIBLE_DEVICES": "7"}}, True, None, 0.9),
        (True, {"gpus": 2}, True, None, 0.9),
    ],
)
def test_the_share_by_default(
    has_gpu: bool,
    settings: dict[str, Any],
    is_training: bool,
    left: float | None,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    spec = replace(SPEC, is_training=is_training, memory_share=left)
    assert default_share(ServerRollout(**settings), spec) == share


def test_a_server_that_sleeps_is_started_so() -> None:
    assert "--enable-sleep-mode" in options(VLLM(), sleeps=True)
    assert "--enable-sleep-mode" not in options(VLLM())


@pytest.mark.parametrize(("program", "option"), [(VLLM(), "--tensor-parallel-size"), (SGLang(), "--tp-size")])
def test_gpus_of_its_own_are_all_used(program: Program, option: str) -> None:
    found = options(program, gpus=("2", "3"))
    assert found[found.index(option) + 1] == "2"
    assert option not in options(program)


@pytest.mark.parametrize(
    ("settings", "sleeps"),
    [
        ({}, True),
        ({"sleep": False}, False),
        ({"gpus": 1}, False),
        ({"gpus": 1, "sleep": True}, True),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "7"}}, False),
        ({"overlap": True, "staleness": 1}, False),
        ({"program": "sglang"}, False),
        ({"url": "http://localhost:8000"}, False),
    ],
)
def test_a_server_sleeps_where_others_need_its_memory(settings: dict[str, Any], sleeps: bool) -> None:
    assert ServerRollout(**settings).sleeps_on_gpus is sleeps


@pytest.mark.parametrize(
    "settings", [{"program": "sglang"}, {"url": "http://localhost:8000"}, {"overlap": True, "staleness": 1}]
)
def test_a_server_that_cannot_sleep_is_not_asked_to(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"sleep=true with rollout\.\w+=.*write rollout\.sleep=false"):
        ServerRollout(sleep=True, **settings)


def test_every_type_of_engine_and_every_program_is_there() -> None:
    union, _ = get_args(Rollouts)
    programs = set(get_args(ServerRollout.model_fields["program"].annotation))

    assert set(get_args(union)) == ENGINES.keys()
    assert programs == PROGRAMS.keys() == REQUIREMENTS.keys()


def test_gpus_are_named_once() -> None:
    """Bug: a server of more parallel ranks than it sees GPUs, while the training gives up others."""
    with pytest.raises(ValueError, match=r"gpus=2 with environment\.CUDA_VISIBLE_DEVICES=3: .* leave out one"):
        ServerRollout(gpus=2, environment={"CUDA_VISIBLE_DEVICES": "3"})
