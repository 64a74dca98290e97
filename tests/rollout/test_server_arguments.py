"""Options of servers that are started, and the tables of programs and engines."""

from pathlib import Path
from typing import get_args

import pytest
import torch

from nemo_opd.config.rollout import Rollouts, ServerRollout
from nemo_opd.rollout.base import EngineSpec
from nemo_opd.rollout.engines import ENGINES
from nemo_opd.rollout.installed import REQUIREMENTS
from nemo_opd.rollout.server.engine import PROGRAMS, default_share
from nemo_opd.rollout.server.program import Program
from nemo_opd.rollout.server.sglang import SGLang
from nemo_opd.rollout.server.vllm import VLLM


def options(program: Program, *, rounds_logits: bool = False) -> list[str]:
    spec = EngineSpec(8, frozenset(), "bfloat16", Path(), rounds_logits=rounds_logits)
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
    ("has_gpu", "environment", "is_training", "share"),
    [
        (False, {}, True, 0.3),
        (False, {}, False, 0.3),
        (True, {}, True, 0.3),
        (True, {}, False, 0.9),
        (True, {"CUDA_VISIBLE_DEVICES": "7"}, True, 0.9),
    ],
)
def test_the_share_by_default(
    has_gpu: bool, environment: dict[str, str], is_training: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert default_share(ServerRollout(environment=environment), is_training) == share


def test_every_type_of_engine_and_every_program_is_there() -> None:
    union, _ = get_args(Rollouts)
    programs = set(get_args(ServerRollout.model_fields["program"].annotation))

    assert set(get_args(union)) == ENGINES.keys()
    assert programs == PROGRAMS.keys() == REQUIREMENTS.keys()
