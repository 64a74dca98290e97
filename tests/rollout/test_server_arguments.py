"""Options of servers that are started, and the tables of programs and engines."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch

from nemo_opd.config.rollout import Rollouts, ServerRollout
from nemo_opd.rollout import installed
from nemo_opd.rollout.engines import ENGINES
from nemo_opd.rollout.server.engine import PROGRAMS, default_share
from nemo_opd.rollout.server.program import Launch
from nemo_opd.rollout.server.sglang import SGLang
from nemo_opd.rollout.server.vllm import VLLM


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (SGLang().arguments, ["--enable-fp32-lm-head"]),
        (VLLM().arguments, ["--hf-overrides", '{"head_dtype": "float32"}']),
    ],
    ids=["sglang", "vllm"],
)
def test_logits_are_rounded_where_the_trainers_are(arguments: Callable[[Launch], list[str]], option: list[str]) -> None:
    """Bug: one of two that are compared rounds, which is worse than if both do."""
    rounded, whole = (arguments(Launch("m", "bfloat16", None, 1, fp32, 0.3)) for fp32 in (False, True))
    assert [each for each in whole if each not in rounded] == option
    assert [each for each in whole if each in rounded] == rounded


@pytest.mark.parametrize(
    ("arguments", "option"),
    [(SGLang().arguments, "--mem-fraction-static"), (VLLM().arguments, "--gpu-memory-utilization")],
    ids=["sglang", "vllm"],
)
def test_memory_is_left_to_the_training(arguments: Callable[[Launch], list[str]], option: str) -> None:
    """Bug: a server that takes nine tenths of a machine or a GPU on which a student is already."""
    options = arguments(Launch("m", "float32", None, 1, fp32_logits=False, memory_share=0.3))
    assert options[options.index(option) + 1] == "0.3"


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
    assert programs == PROGRAMS.keys() == installed.MODULES.keys() == installed.INSTALL.keys()
