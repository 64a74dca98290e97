"""Options of started servers, and the tables of programs and engines."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from nemo_opd.config.rollout import Rollouts, ServerRollout
from nemo_opd.extras import HOW_TO_INSTALL
from nemo_opd.rollout.engine_interface import Completion, EngineSpec, Request, Sampling
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
def test_logits_are_rounded_as_in_the_trainer(program: Program, option: list[str]) -> None:
    """Bug: only the trainer or only the server rounds its logits, which is worse than if both do."""
    rounded, exact = (options(program, rounds_logits=rounds) for rounds in (True, False))
    assert [argument for argument in exact if argument not in rounded] == option
    assert [argument for argument in exact if argument in rounded] == rounded


@pytest.mark.parametrize(
    ("program", "option"),
    [(SGLang(), "--mem-fraction-static"), (VLLM(), "--gpu-memory-utilization")],
    ids=["sglang", "vllm"],
)
def test_training_gets_its_share_of_memory(program: Program, option: str) -> None:
    """Bug: a server that takes nine tenths of a machine or GPU that it shares with the student."""
    assert options(program)[options(program).index(option) + 1] == "0.3"


@pytest.mark.parametrize(
    ("has_gpu", "settings", "is_training", "memory_share", "share"),
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
def test_the_default_share(
    has_gpu: bool,
    settings: dict[str, Any],
    is_training: bool,
    memory_share: float | None,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    spec = replace(SPEC, is_training=is_training, memory_share=memory_share)
    assert default_share(ServerRollout(**settings), spec) == share


def test_sglang_has_room_for_the_longest_sequence() -> None:
    """Bug: SGLang refuses prompts that reach the last six positions of its context, and cuts responses short."""
    arguments = options(SGLang(), max_length=100)
    assert arguments[arguments.index("--context-length") + 1] == "106"
    assert SGLang.environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"


def test_sglang_ends_at_stop_tokens() -> None:
    """Bug: with ignore_eos, SGLang ignores `stop_token_ids` as well."""
    request = Request(np.array([1], np.int32), max_new_tokens=4, seed=0)
    sampling = SGLang().body(request, Sampling(), RequestContext("m", frozenset({2}), 8, 8))["sampling_params"]
    assert sampling["stop_token_ids"] == [2]
    assert "ignore_eos" not in sampling


def test_sglang_echoes_the_last_id_of_the_vocabulary_as_0() -> None:
    """Bug: a correct reply is refused as an answer about another prompt. Recorded from SGLang 0.5.23."""
    completion = Completion(
        np.array([134, 299, 171, 51], np.int32), *(np.zeros(4, np.float32) for _ in range(2)), "length", 0
    )
    entries = [[-8.057840347290039, 174, None], [-1.6808485984802246, 134, None], [-3.6983797550201416, 0, None]]
    entries.append([-1.415235161781311, 171, None])
    reply = {"meta_info": {"input_token_logprobs": entries, "output_token_ids_logprobs": [[[-0.5, 51, None]]]}}
    assert SGLang().raw_logprobs(reply, completion) == [
        -1.6808485984802246,
        -3.6983797550201416,
        -1.415235161781311,
        -0.5,
    ]
    entries[1][1] = 0
    with pytest.raises(UnusableError, match="other tokens"):
        SGLang().raw_logprobs(reply, completion)


def test_a_server_that_sleeps_has_its_option() -> None:
    assert "--enable-sleep-mode" in options(VLLM(), sleeps=True)
    assert "--enable-sleep-mode" not in options(VLLM())


@pytest.mark.parametrize(("program", "option"), [(VLLM(), "--tensor-parallel-size"), (SGLang(), "--tp-size")])
def test_a_servers_gpus_are_all_used(program: Program, option: str) -> None:
    arguments = options(program, gpus=("2", "3"))
    assert arguments[arguments.index(option) + 1] == "2"
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
def test_a_server_sleeps_if_training_needs_its_memory(settings: dict[str, Any], sleeps: bool) -> None:
    assert ServerRollout(**settings).sleeps_on_gpus is sleeps


@pytest.mark.parametrize(
    "settings", [{"program": "sglang"}, {"url": "http://localhost:8000"}, {"overlap": True, "staleness": 1}]
)
def test_sleep_is_refused_for_a_server_that_cannot_sleep(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"sleep=true with rollout\.\w+=.*write rollout\.sleep=false"):
        ServerRollout(sleep=True, **settings)


def test_every_engine_and_program_is_in_its_table() -> None:
    union, _ = get_args(Rollouts)
    programs = set(get_args(ServerRollout.model_fields["program"].annotation))

    assert set(get_args(union)) == ENGINES.keys()
    assert programs == PROGRAMS.keys() == HOW_TO_INSTALL.keys()


def test_gpus_are_set_in_one_place() -> None:
    """Bug: a server with more parallel ranks than visible GPUs, while training gives up other GPUs."""
    with pytest.raises(ValueError, match=r"gpus=2 with environment\.CUDA_VISIBLE_DEVICES=3: .* leave out one"):
        ServerRollout(gpus=2, environment={"CUDA_VISIBLE_DEVICES": "3"})


@pytest.mark.parametrize(
    "option", ["--host", "--host=0.0.0.0", "--port", "--por=80", "--uds", "--config", "--api-key=x", "--api_key"]
)
def test_options_of_the_address_and_key_are_refused(option: str) -> None:
    """Bug: a recipe opens the server, which accepts weights from any client, to the network."""
    with pytest.raises(ValidationError, match="the run chooses address, key"):
        ServerRollout(options=("--max-num-seqs", "8", option))
    assert ServerRollout(options=("--max-num-seqs", "8", "--hf-overrides", "{}")).options[0] == "--max-num-seqs"
