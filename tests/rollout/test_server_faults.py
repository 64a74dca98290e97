"""Faults of a server: each is one clear error or a counted retry, in time."""

import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from nemo_opd.config.rollout import ServerRollout
from nemo_opd.errors import RolloutError
from nemo_opd.handoff.shared_memory import HeldWeights
from nemo_opd.rollout.engine_interface import Completion, EngineSpec, Request, Sampling
from nemo_opd.rollout.server import client
from nemo_opd.rollout.server.client import RequestContext, UnusableError
from nemo_opd.rollout.server.engine import ServerEngine
from nemo_opd.rollout.server.sglang import SGLang
from tests.rollout.fake_server import LOGPROB, Json, Responder, fake_server, fine, sglang_answer
from tests.tiny import Tiny


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.01)


VOCAB = 64
END = 60


def make_requests(count: int = 3, max_new_tokens: int = 4) -> list[Request]:
    return [Request(np.array([seed, 2, 3], np.int32), max_new_tokens, seed) for seed in range(count)]


def engine_of(
    url: str, folder: Path, model: str | Path = "student", *, sleeps: bool = False, **settings: Any
) -> ServerEngine:
    return ServerEngine(
        ServerRollout(url=url, **({"retries": 2, "request_timeout_s": 20} | settings)),
        EngineSpec(VOCAB, frozenset({END}), "float32", folder, sleeps=sleeps),
        model,
    )


def after_the_probe(respond: Responder) -> Responder:
    """Answer requests for one token as usual."""
    return lambda body: fine(body) if body["max_tokens"] == 1 else respond(body)


def changed(**changes: Any) -> Responder:
    return lambda body: fine(body, **changes)


def logprobs(*values: float) -> Json:
    return {"logprobs": {"token_logprobs": list(values)}}


def test_completions_are_in_the_requests_order(tmp_path: Path) -> None:
    """Bug: completions in the order of the server's answers, which are reversed here."""

    def respond(body: Json) -> tuple[int, Json]:
        time.sleep(0.1 / (1 + body["prompt"][0]))
        return fine(body)

    with fake_server(respond) as (url, _), engine_of(url, tmp_path, concurrency=4) as engine:
        completions = engine.generate(make_requests(8), Sampling())

    assert [completion.ids.tolist() for completion in completions] == [[seed + 1] * 4 for seed in range(8)]
    assert all(completion.logprobs.tolist() == [LOGPROB] * 4 for completion in completions)
    assert {completion.finish_reason for completion in completions} == {"length"}


def test_a_server_sleeps_between_samplings_and_wakes_for_new_weights(tmp_path: Path, tiny: Tiny) -> None:
    """Bugs: weights written to released memory; requests to a sleeping server; repeated calls."""
    with fake_server() as (url, calls), engine_of(url, tmp_path, tiny.student, sleeps=True) as engine:
        calls.clear()
        engine.rest()
        engine.rest()
        engine.update_weights(tiny.student, 1)
        engine.generate(make_requests(1), Sampling())
        engine.rest()
        engine.generate(make_requests(1), Sampling())

    paths = [path for path, _ in calls]
    updates = ["/init_weight_transfer_engine", "/pause", "/start_weight_update"]
    updates += ["/update_weights", "/finish_weight_update", "/resume"]
    sampled = "/v1/completions"
    assert paths == ["/sleep?level=1", "/wake_up", *updates, sampled, "/sleep?level=1", "/wake_up", sampled]


def test_a_server_without_sleep_stays_awake(tmp_path: Path) -> None:
    with fake_server() as (url, calls), engine_of(url, tmp_path) as engine:
        calls.clear()
        engine.rest()
    assert calls == []


def test_a_server_that_cannot_wake_up_is_an_error(tmp_path: Path) -> None:
    with fake_server(refuses="/wake_up") as (url, _), engine_of(url, tmp_path, sleeps=True) as engine:
        engine.rest()
        with pytest.raises(RolloutError, match=r"cannot get its memory back: .*; lower rollout\.memory_share, or "):
            engine.generate(make_requests(1), Sampling())


UNUSABLE = {
    "no token ids": changed(token_ids=None),
    "no log-probabilities": changed(logprobs=None),
    "4 tokens and 3 log-probabilities": changed(**logprobs(-1, -1, -1)),
    "5 tokens, and at most 4": changed(token_ids=[1] * 5, **logprobs(*[-1.0] * 5)),
    "outside the vocabulary of 64": changed(token_ids=[1, 2, 3, VOCAB]),
    "nan is not a log-probability": changed(**logprobs(-1, math.nan, -1, -1)),
    "0.5 is not a log-probability": changed(**logprobs(-1, 0.5, -1, -1)),
    "'other' and not by 'student'": changed(model="other"),
    "continues after a token that ends": changed(token_ids=[1, END, 3, 4]),
    r"ended \(stop\) with token 3": changed(token_ids=[1, 2, 3], finish_reason="stop", **logprobs(-1, -1, -1)),
    "answer of another form": lambda body: (200, {"choices": []}),
    "status 500": lambda body: (500, {"error": "again"}),
}


@pytest.mark.parametrize("reason", UNUSABLE)
def test_an_unusable_answer_is_retried_and_then_an_error(reason: str, tmp_path: Path) -> None:
    with fake_server(after_the_probe(UNUSABLE[reason])) as (url, calls), engine_of(url, tmp_path, retries=1) as engine:
        with pytest.raises(RolloutError, match=reason) as caught:
            engine.generate(make_requests(1), Sampling())

        assert engine.retried == 1
        assert len(calls) == 1 + 2

    assert url in str(caught.value)
    assert "prompt 0" in str(caught.value)
    assert "rollout.retries=1" in str(caught.value)


def test_retries_that_succeed_are_counted(tmp_path: Path) -> None:
    tries: dict[int, int] = {}

    def respond(body: Json) -> tuple[int, Json]:
        tries[body["prompt"][0]] = tries.get(body["prompt"][0], 0) + 1
        return (500, {}) if body["prompt"][0] == 1 and tries[1] < 3 else fine(body)

    with fake_server(after_the_probe(respond)) as (url, _), engine_of(url, tmp_path) as engine:
        completions = engine.generate(make_requests(3), Sampling())

        assert engine.retried == 2
    assert [int(completion.ids[0]) for completion in completions] == [1, 2, 3]


def test_a_refused_request_is_not_retried(tmp_path: Path) -> None:
    with fake_server(after_the_probe(lambda body: (400, {"error": "too long"}))) as (url, _):
        with engine_of(url, tmp_path) as engine, pytest.raises(RolloutError, match=r"refused prompt 0: .*too long"):
            engine.generate(make_requests(1), Sampling())

        assert engine.retried == 0


def test_a_server_that_hangs_has_a_limit(tmp_path: Path) -> None:
    ended = threading.Event()

    def respond(body: Json) -> tuple[int, Json]:
        if body["prompt"][0] == 1:
            ended.wait()
        return fine(body)

    with (
        fake_server(after_the_probe(respond)) as (url, _),
        engine_of(url, tmp_path, request_timeout_s=1, retries=1) as engine,
    ):
        with pytest.raises(RolloutError, match=r"prompt 1 .*no answer in 1 s \(rollout.request_timeout_s\)"):
            engine.generate(make_requests(3), Sampling())
        ended.set()


def test_an_address_without_a_server_is_refused(tmp_path: Path) -> None:
    with fake_server() as (url, _):
        pass

    with pytest.raises(RolloutError, match=f"rollout.url={url}: there is no healthy server"):
        engine_of(url, tmp_path)


def test_a_server_without_token_ids_is_refused_at_the_start(tmp_path: Path) -> None:
    with (
        fake_server(changed(token_ids=None)) as (url, _),
        pytest.raises(RolloutError, match=r"no token ids; .*VLLM_SERVER_DEV_MODE"),
    ):
        engine_of(url, tmp_path, retries=0)


def test_a_server_of_another_model_is_refused(tmp_path: Path) -> None:
    with fake_server() as (url, _), pytest.raises(RolloutError, match="serves student and not org/other"):
        engine_of(url, tmp_path, model="org/other")


def test_an_external_server_loads_the_students_weights_first(tiny: Tiny, tmp_path: Path) -> None:
    with fake_server() as (url, calls), engine_of(url, tmp_path, model=tiny.student):
        loaded = [body["update_info"]["files"] for path, body in calls if path == "/update_weights"]

    assert loaded == [[str(tiny.student / "model.safetensors")]]


LOAD = [
    *("/init_weight_transfer_engine", "/pause", "/start_weight_update", "/update_weights"),
    *("/finish_weight_update", "/resume"),
]
"""The calls that load weights: sampling, which fills the cache, pauses between them."""


def test_new_weights_wait_for_requests_in_flight(tiny: Tiny, tmp_path: Path) -> None:
    """Bug: samples of the old weights have the new weights' version."""
    in_flight = threading.Event()

    def respond(body: Json) -> tuple[int, Json]:
        in_flight.set()
        time.sleep(0.3)
        return fine(body)

    with fake_server(after_the_probe(respond)) as (url, calls), engine_of(url, tmp_path, model=tiny.student) as engine:
        completions: list[Any] = []
        sampling = threading.Thread(target=lambda: completions.extend(engine.generate(make_requests(2), Sampling())))
        sampling.start()
        in_flight.wait()
        engine.update_weights(tiny.student, 5)
        sampling.join()
        after = engine.generate(make_requests(1), Sampling())
        order = [path for path, _ in calls]

    assert {completion.version for completion in completions} == {0}
    assert after[0].version == engine.version == 5
    probe = sample = "/v1/completions"
    assert order == [*LOAD, probe, sample, sample, *LOAD, sample]


def test_weights_of_another_model_never_reach_the_server(tiny: Tiny, tmp_path: Path) -> None:
    with fake_server() as (url, calls), engine_of(url, tmp_path, model=tiny.student) as engine:
        with pytest.raises(RolloutError, match="another model than"):
            engine.update_weights(tiny.teacher_same, 1)

        assert engine.generate(make_requests(1), Sampling())[0].version == 0
        assert [path for path, _ in calls].count("/init_weight_transfer_engine") == 1


def test_an_engine_is_unusable_after_a_failed_update(tiny: Tiny, tmp_path: Path) -> None:
    """Bug: samples of a mixture of old and new weights."""
    with fake_server(refuses="/update_weights") as (url, _), engine_of(url, tmp_path) as engine:
        with pytest.raises(RolloutError, match=r"version 1 .*not loaded: .*/update_weights answered 500.*the fake"):
            engine.update_weights(tiny.student, 1)

        with pytest.raises(RolloutError, match="cannot be used any more: version 1"):
            engine.generate(make_requests(1), Sampling())


def test_the_error_of_an_external_server_without_our_options_names_them(tiny: Tiny, tmp_path: Path) -> None:
    with (
        fake_server(refuses="/init_weight_transfer_engine") as (url, _),
        pytest.raises(
            RolloutError, match=r"version 0 .*answered 500.*--weight-transfer-config '\{\"backend\": \"nemo_opd"
        ),
    ):
        engine_of(url, tmp_path, model=tiny.student)


def held(folder: Path) -> HeldWeights:
    return HeldWeights(load_file(folder / "model.safetensors"))


def test_weights_in_memory_are_loaded_by_their_path(tiny: Tiny, tmp_path: Path) -> None:
    with fake_server() as (url, calls), engine_of(url, tmp_path, model=tiny.student) as engine:
        calls.clear()
        weights = held(tiny.student)

        assert engine.update_from_memory(weights.file, 5)

        weights.close()
        assert [path for path, _ in calls] == LOAD
        bodies = dict(calls)
        assert bodies["/update_weights"] == {"update_info": {"files": [weights.file.path]}}
        assert bodies["/finish_weight_update"] == {"weight_version": "5"}
        assert engine.generate(make_requests(1), Sampling())[0].version == engine.version == 5


def test_missing_memory_changes_nothing(tiny: Tiny, tmp_path: Path) -> None:
    """Bug: a server on another machine, which may have another file at the same path, loses its weights."""
    with fake_server() as (url, calls), engine_of(url, tmp_path, model=tiny.student) as engine:
        calls.clear()
        weights = held(tiny.student)
        weights.close()
        with (tiny.student / "model.safetensors").open("rb") as file:
            assert not engine.update_from_memory(weights.file, 1)
            assert not engine.update_from_memory(replace(weights.file, number=file.fileno()), 1)

        assert calls == []
        assert engine.generate(make_requests(1), Sampling())[0].version == 0


def test_memory_that_the_server_cannot_see_changes_nothing(tiny: Tiny, tmp_path: Path) -> None:
    with (
        fake_server(refuses="/init_weight_transfer_engine") as (url, calls),
        engine_of(url, tmp_path) as engine,
    ):
        weights = held(tiny.student)
        assert not engine.update_from_memory(weights.file, 1)
        weights.close()

        assert engine.generate(make_requests(1), Sampling())[0].version == 0
        assert not {path for path, _ in calls} & set(LOAD[1:])


def test_a_missing_tensor_is_an_error(tiny: Tiny, tmp_path: Path) -> None:
    """Bug: the server keeps the tensor's old values."""
    state = load_file(tiny.student / "model.safetensors")
    del state["model.layers.1.mlp.gate_proj.weight"]
    with fake_server() as (url, _), engine_of(url, tmp_path, model=tiny.student) as engine:
        weights = HeldWeights(state)
        with pytest.raises(RolloutError, match=r"another model .*it has no model.layers.1.mlp.gate_proj.weight"):
            engine.update_from_memory(weights.file, 1)

        weights.close()
        assert engine.generate(make_requests(1), Sampling())[0].version == 0


def test_head_rows_without_a_token_are_suppressed(tiny: Tiny, tmp_path: Path) -> None:
    with fake_server() as (url, calls), engine_of(url, tmp_path, model=tiny.student):
        body = calls[-1][1]

    # The tiny student has 376 head rows; the engine's vocabulary is 64.
    assert body["logit_bias"] == {str(row): -100.0 for row in range(VOCAB, 376)}


def test_raw_log_probabilities_are_requested_if_sampling_is_warped(tmp_path: Path) -> None:
    """Bugs: log-probabilities of the wrong positions; requests in evaluation, which does not need them."""
    with fake_server() as (url, calls), engine_of(url, tmp_path, temperature=0.6) as engine:
        completions = engine.generate(make_requests(2), Sampling(0.6))
        del calls[:]
        engine.generate(make_requests(2), Sampling(0.6, needs_raw=False))

    assert len(calls) == 2
    for completion in completions:
        assert completion.behaviour_logprobs.tolist() == [LOGPROB] * 4
        assert completion.logprobs.tolist() == [-4.0, -5.0, -6.0, -7.0]


def test_a_server_with_raw_log_probabilities_is_refused(tmp_path: Path) -> None:
    """Bug: an external server with an older release's options, whose raw log-probabilities count as the policy's."""

    def respond(body: Json) -> tuple[int, Json]:
        return fine(body, **logprobs(LOGPROB))

    with (
        fake_server(respond) as (url, _),
        pytest.raises(RolloutError, match=r"not those of the sampling policy.*--logprobs-mode processed_logprobs"),
    ):
        engine_of(url, tmp_path)


def test_sglangs_request_and_answer() -> None:
    request = Request(np.array([4, 5], np.int32), 3, seed=2**40, stop=("end",))
    program = SGLang()

    body = program.body(request, Sampling(0.5, top_k=9), RequestContext("student", frozenset({END}), VOCAB, VOCAB))
    answer = program.answer(sglang_answer(body)[1])

    assert body["input_ids"] == [4, 5]
    assert (body["sampling_params"]["stop_token_ids"], body["sampling_params"]["stop"]) == ([END], ["end"])
    assert 0 <= body["sampling_params"]["sampling_seed"] < 2**31
    assert (answer.ids, answer.logprobs, answer.finish_reason) == ([7] * 3, [LOGPROB] * 3, "length")


def test_sglangs_raw_log_probabilities() -> None:
    """In the documented form: log-probabilities of the prompt's tokens after the first, and of one requested token."""
    request = Request(np.array([4, 5], np.int32), 3, seed=0)
    sampled = np.full(3, -0.1, np.float32)
    completion = Completion(np.array([7, 8, 9], np.int32), sampled, sampled, "length", 0)
    program = SGLang()

    body = program.raw_body(request, completion, RequestContext("student", frozenset({END}), VOCAB, VOCAB))
    assert body is not None
    meta = {
        "input_token_logprobs": [[None, 4, None], [-1.0, 5, None], [-2.0, 7, None], [-3.0, 8, None]],
        "output_token_ids_logprobs": [[[-4.0, 9, None]]],
    }

    assert (body["input_ids"], body["token_ids_logprob"]) == ([4, 5, 7, 8], [9])
    assert program.raw_logprobs({"meta_info": meta}, completion) == [-2.0, -3.0, -4.0]
    with pytest.raises(UnusableError, match="other tokens"):
        program.raw_logprobs({"meta_info": meta | {"output_token_ids_logprobs": [[[-4.0, 8, None]]]}}, completion)
