"""Options of servers that are started, and the tables of programs and engines."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from nemo_opd.config.rollout import Rollouts, ServerRollout
from nemo_opd.extras import HOW_TO_INSTALL
from nemo_opd.rollout.requests import Completion, EngineSpec, Request, Sampling
from nemo_opd.rollout.server.client import RequestContext, UnusableError
from nemo_opd.rollout.server.engine import PROGRAMS
from nemo_opd.rollout.server.server_process import Program, default_share
from nemo_opd.rollout.server.sglang import SGLang
from nemo_opd.rollout.server.vllm import VLLM
from nemo_opd.training.engines import ENGINES

SPEC = EngineSpec(8, frozenset(), "bfloat16", Path())


def options(program: Program, **changes: Any) -> list[str]:
    spec = replace(SPEC, **changes)
    return program.arguments("m", spec, 0.3)


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


def test_sglang_has_room_for_the_longest_sequence() -> None:
    """Bug: SGLang refuses prompts that reach the last six positions of its context, and cuts responses short."""
    found = options(SGLang(), max_length=100)
    assert found[found.index("--context-length") + 1] == "106"
    assert SGLang.environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"


def test_sglang_ends_at_stop_tokens() -> None:
    """Bug: with ignore_eos it goes on after `stop_token_ids` as well."""
    request = Request(np.array([1], np.int32), max_new_tokens=4, seed=0)
    sampling = SGLang().body(request, Sampling(), RequestContext("m", frozenset({2}), 8, 8))["sampling_params"]
    assert sampling["stop_token_ids"] == [2]
    assert "ignore_eos" not in sampling


def test_sglang_calls_the_last_id_of_the_vocabulary_0() -> None:
    """Bug: a reply about the prompt that was sent is taken for one about another. Recorded of SGLang 0.5.23."""
    completion = Completion(
        np.array([134, 299, 171, 51], np.int32), *(np.zeros(4, np.float32) for _ in range(2)), "length", 0
    )
    known = [[-8.057840347290039, 174, None], [-1.6808485984802246, 134, None], [-3.6983797550201416, 0, None]]
    known.append([-1.415235161781311, 171, None])
    reply = {"meta_info": {"input_token_logprobs": known, "output_token_ids_logprobs": [[[-0.5, 51, None]]]}}
    assert SGLang().raw_logprobs(reply, completion) == [
        -1.6808485984802246,
        -3.6983797550201416,
        -1.415235161781311,
        -0.5,
    ]
    known[1][1] = 0
    with pytest.raises(UnusableError, match="other tokens"):
        SGLang().raw_logprobs(reply, completion)


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
    assert programs == PROGRAMS.keys() == HOW_TO_INSTALL.keys()


def test_gpus_are_named_once() -> None:
    """Bug: a server of more parallel ranks than it sees GPUs, while the training gives up others."""
    with pytest.raises(ValueError, match=r"gpus=2 with environment\.CUDA_VISIBLE_DEVICES=3: .* leave out one"):
        ServerRollout(gpus=2, environment={"CUDA_VISIBLE_DEVICES": "3"})


@pytest.mark.parametrize(
    "option", ["--host", "--host=0.0.0.0", "--port", "--por=80", "--uds", "--config", "--api-key=x", "--api_key"]
)
def test_a_server_does_not_listen_elsewhere(option: str) -> None:
    """Bug: a recipe opened the server, which takes weights from anybody, to the network."""
    with pytest.raises(ValidationError, match="the run chooses address, key"):
        ServerRollout(options=("--max-num-seqs", "8", option))
    assert ServerRollout(options=("--max-num-seqs", "8", "--hf-overrides", "{}")).options[0] == "--max-num-seqs"
