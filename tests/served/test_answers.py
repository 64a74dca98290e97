"""Servers' log-probabilities of a prompt: rows, checks, and servers that fail."""

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nemo_opd.config.teacher import Endpoint
from nemo_opd.errors import EndpointError
from nemo_opd.logits.rows import SparseRows
from nemo_opd.models.stored_output import served_layout
from nemo_opd.rollout.server.client import LoadBalancer
from nemo_opd.served.answers import EndpointAnswers, check_endpoint
from tests.rollout.fake_server import Handler, Json, Responder
from tests.served.endpoint import MODEL, answering, endpoint, of_uniform

VOCAB = 50
IDS = np.array([3, 1, 40, 7], np.int32)
LAST = np.array([3, 49, 0, 49, 7], np.int32)
"""Ids with the last id of the vocabulary."""
TEXTS = [range(1, 9), range(20, 40)]
fine = answering(of_uniform(VOCAB))


def ask(*urls: str, vocab_size: int = VOCAB, sequences: Any = (IDS,), **settings: Any) -> list[SparseRows]:
    endpoint_settings = Endpoint(**{"urls": urls, "logprobs": 4, "retries": 0, **settings})
    layout = served_layout(endpoint_settings, vocab_size)
    segments = EndpointAnswers(endpoint_settings, MODEL, layout, key="teachers.0").segments(list(sequences))
    return [layout.decode(torch.from_numpy(np.array(segment.rows))) for segment in segments]


@pytest.mark.parametrize("program", ["vllm", "sglang", "openai"])
def test_rows_equal_those_of_the_full_distribution(program: str) -> None:
    """Catches rows shifted by a token, a tail with the realised token, and the least likely ids.

    The oracle encodes the full distribution, like a cache that was filled by a loaded model.
    """
    with endpoint(fine) as (url, _):
        (rows,) = ask(url, program=program)
    layout = served_layout(Endpoint(urls=("http://x",), logprobs=4), VOCAB)
    following = torch.tensor([1, 40, 7, -1])
    expected = layout.decode(layout.encode(of_uniform(VOCAB)(IDS.tolist()).contiguous(), following))
    assert torch.equal(rows.ids, expected.ids)
    for name in ("log_p", "log_p_next"):
        assert torch.allclose(getattr(rows, name), getattr(expected, name))
    assert torch.allclose(rows.log_rest.exp(), expected.log_rest.exp(), atol=1e-6)
    assert rows.entropy.isnan().all()  # unknown from the likeliest tokens


@pytest.mark.parametrize("program", ["vllm", "sglang", "openai"])
def test_prompts_may_contain_the_last_id_of_the_vocabulary(program: str) -> None:
    """Catches SGLang's changed echo, refused as another prompt."""
    with endpoint(fine) as (url, _):
        (rows,) = ask(url, program=program, sequences=[LAST])
    expected = of_uniform(VOCAB)(LAST.tolist())
    torch.testing.assert_close(rows.log_p_next[:-1], expected[range(4), LAST[1:]], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("program", "longest"), [("vllm", 99), ("sglang", 93), ("openai", 99)])
def test_the_longest_sequence_leaves_the_programs_reserve(program: str, longest: int) -> None:
    """Catches sequences that SGLang refuses in the middle of a run, as it reserves 6 positions more."""
    with endpoint(fine, limit=100) as (url, _):
        endpoint_settings = Endpoint(urls=(url,), program=program, logprobs=4)
        assert (
            check_endpoint(endpoint_settings, MODEL, key="teachers.0", vocab_size=VOCAB, token=VOCAB - 1, texts=TEXTS)
            == longest
        )


def test_a_tail_that_rounding_hides_is_not_0() -> None:
    """Catches a tail of −inf, which makes a reverse KL infinite, and one above the bound by the least likely token."""
    sharp = lambda ids: torch.tensor([0.0, -18.0, -30.0, -40.0, -41.0]).log_softmax(0).expand(len(ids), 5)  # noqa: E731
    with endpoint(answering(sharp)) as (url, _):
        (rows,) = ask(url, vocab_size=5, sequences=[np.array([0, 0])], logprobs=2)
        assert (rows.log_rest <= -18.0 + math.log(3) + 1e-5).all()
        assert rows.log_rest.isfinite().all()
        (complete,) = ask(url, vocab_size=5, sequences=[np.array([0, 0])], logprobs=99)
        assert (complete.log_rest == -math.inf).all()


def test_head_rows_without_a_token_are_in_the_tail() -> None:
    """Catches an id beyond the vocabulary that reaches a loss."""
    backwards = lambda ids: of_uniform(VOCAB)(ids).flip(1)  # noqa: E731
    with endpoint(answering(backwards)) as (url, _):
        (rows,) = ask(url, vocab_size=VOCAB - 2)
    assert (rows.ids[:, :2] == torch.tensor([47, 46])).all()
    assert (rows.ids[:, 2:] >= VOCAB).all()
    assert (rows.log_p[:, 2:] == -math.inf).all()
    # Tokens 49 and 48 have 1/2 and 1/4; tokens 47 and 46 have 1/8 and 1/16.
    assert rows.log_rest.exp()[-1] == pytest.approx(1 - 1 / 8 - 1 / 16, abs=1e-5)


def test_a_head_row_that_displaces_a_token_is_refused() -> None:
    """Catches a displaced token that counts as probability 0, which makes a reverse KL infinite."""
    backwards = lambda ids: of_uniform(VOCAB)(ids).flip(1)  # noqa: E731
    with endpoint(answering(backwards)) as (url, _):
        with pytest.raises(EndpointError, match=r"id 49 is not in the vocabulary"):
            ask(url, vocab_size=VOCAB - 2, logprobs=VOCAB)
        (rows,) = ask(url, vocab_size=VOCAB - 2, logprobs=VOCAB - 3)
    assert rows.log_rest.isfinite().all()


def changed(change: Callable[[Json], object]) -> Responder:
    """Return vLLM's answer with a change."""

    def respond(body: Json) -> tuple[int, Json]:
        status, reply = fine(body)
        change(reply)
        return status, reply

    return respond


def choice(**changes: object) -> Responder:
    return changed(lambda reply: reply["choices"][0].update(changes))


def dropped(reply: Json) -> None:
    position = reply["choices"][0]["prompt_logprobs"][2]
    del position[next(token for token in position if token != "40")]


def shifted(reply: Json) -> None:
    reply["choices"][0]["prompt_logprobs"].pop()


@pytest.mark.parametrize(
    ("respond", "reason"),
    [
        (choice(prompt_token_ids=[3, 1, 41, 7]), "about other token ids: 41 at position 2, where 40 was sent"),
        (choice(prompt_token_ids=[3, 1, 40]), "nothing at position 3, where 7 was sent"),
        (choice(prompt_token_ids=None), "does not say which token ids"),
        (choice(prompt_logprobs=None), "no log-probabilities of the prompt"),
        (changed(shifted), "log-probabilities of 3 tokens, and 4 were sent"),
        (changed(lambda reply: reply.update(model="small")), "by the model 'small' and not by 'big'"),
        (lambda body: fine({**body, "logprobs": 3}), "3 likeliest tokens of position"),
        (
            changed(lambda reply: reply["choices"][0]["prompt_logprobs"][1]["1"].update(logprob=0.5)),
            "0.5 is not a log-probability",
        ),
        (
            changed(lambda reply: [e.update(logprob=-0.1) for e in reply["choices"][0]["prompt_logprobs"][1].values()]),
            "sum to 3.6",
        ),
        (lambda _: (400, {"error": "prompt longer than max_model_len"}), "refused prompt 0: status 400.*max_model_len"),
    ],
)
def test_an_answer_that_cannot_be_used_is_one_message(respond: Responder, reason: str) -> None:
    """Catches a row of another prompt or of an incomplete answer."""
    with endpoint(respond) as (url, _), pytest.raises(EndpointError, match=f"teachers.0: {url}.*{reason}") as caught:
        ask(url)
    assert "\n" not in str(caught.value)


def without_one(program: str, value: float | None) -> Responder:
    """Return an answer with `value` as the second token's log-probability."""

    def change(reply: Json) -> None:
        if program == "vllm":
            position = reply["choices"][0]["prompt_logprobs"][2]
            position["40"]["logprob"] = value
        elif program == "sglang":
            reply["meta_info"]["input_token_logprobs"][2][0] = value
        else:
            reply["choices"][0]["logprobs"]["token_logprobs"][2] = value

    return changed(change)


@pytest.mark.parametrize("value", [None, math.nan])
@pytest.mark.parametrize("program", ["vllm", "sglang", "openai"])
def test_a_missing_log_probability_costs_one_token(program: str, value: float | None) -> None:
    """Catches a run that ends at a server's NaN, a row with the NaN, and shifted rows."""
    with endpoint(fine) as (url, _):
        (complete,) = ask(url, program=program)
    with endpoint(without_one(program, value)) as (url, _):
        (rows,) = ask(url, program=program)
    assert rows.log_p_next.isnan().tolist() == [False, True, False, False]
    for name in ("ids", "log_p", "log_p_next", "log_rest"):
        ours, theirs = (getattr(part, name)[[0, 2, 3]] for part in (rows, complete))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "change",
    [
        lambda reply: reply["choices"][0]["prompt_logprobs"].__setitem__(2, None),
        lambda reply: reply["choices"][0]["prompt_logprobs"][2].pop("40"),
        lambda reply: next(iter(reply["choices"][0]["prompt_logprobs"][2].values())).update(logprob=math.nan),
    ],
)
def test_a_position_without_likeliest_tokens_costs_one_token(change: Callable[[Json], object]) -> None:
    """Catches a position with the next position's likeliest tokens."""
    with endpoint(changed(change)) as (url, _):
        (rows,) = ask(url)
    assert rows.log_p_next.isnan().tolist() == [False, True, False, False]
    assert (rows.ids[[0, 2, 3]] == torch.arange(4)).all()
    assert (rows.log_p[1] == -math.inf).all()


@pytest.mark.parametrize(("missing", "length", "is_refused"), [(2, 4, True), (2, 199, True), (2, 200, False)])
def test_more_than_a_hundredth_missing_is_an_error(missing: int, length: int, is_refused: bool) -> None:
    """Catches a run that silently learns little, as most of the server's log-probabilities are missing."""

    def change(reply: Json) -> None:
        for position in reply["choices"][0]["prompt_logprobs"][1 : 1 + missing]:
            position.clear()

    sequence = np.arange(length, dtype=np.int32) % VOCAB
    with endpoint(changed(change)) as (url, _):
        if not is_refused:
            assert ask(url, sequences=[sequence])[0].log_p_next.isnan().sum() == missing
            return
        with pytest.raises(EndpointError, match="0 likeliest tokens of position 0"):
            ask(url, sequences=[sequence])


@pytest.mark.parametrize(
    ("program", "change", "reason"),
    [
        ("sglang", lambda reply: reply["meta_info"].pop("input_token_logprobs"), "no log-probabilities of the prompt"),
        ("sglang", lambda reply: reply["meta_info"]["input_token_logprobs"].pop(), "nothing at position 3"),
        ("openai", lambda reply: reply["choices"][0].update(logprobs=None), "no log-probabilities"),
        (
            "openai",
            lambda reply: reply["choices"][0]["logprobs"].update(tokens=["a", "b", "c", "d"]),
            "tokens are texts",
        ),
    ],
)
def test_answers_of_sglang_and_openai_are_checked(program: str, change: Callable[[Json], object], reason: str) -> None:
    """Catches checks for vLLM alone."""
    with endpoint(changed(change)) as (url, _), pytest.raises(EndpointError, match=reason):
        ask(url, program=program)


def test_requests_are_balanced_and_limited() -> None:
    """Catches a server without requests, and more requests in flight than `concurrency`."""
    lock, now, most = threading.Lock(), 0, 0
    four_together = threading.Barrier(4)

    def slow(body: Json) -> tuple[int, Json]:
        nonlocal now, most
        with lock:
            now, most = now + 1, max(most, now + 1)
        four_together.wait(timeout=30)
        time.sleep(0.01)  # time for a fifth request to arrive
        with lock:
            now -= 1
        return fine(body)

    with endpoint(slow) as (first, to_first), endpoint(slow) as (second, to_second):
        ask(first, second, sequences=[IDS] * 20, concurrency=4)
    assert most == 4
    assert len(to_first) + len(to_second) == 20
    assert 5 <= len(to_first) <= 15


def test_healthy_servers_answer_if_another_dies() -> None:
    """Catches a run that ends with one of its servers, and a dead server that gets a request for every sequence."""
    dead = []

    def dies(body: Json) -> tuple[int, Json]:
        dead.append(body)
        return 500, {"error": "dead"}

    with endpoint(dies) as (first, _), endpoint(fine) as (second, answered):
        segments = ask(first, "http://127.0.0.1:1", second, sequences=[IDS] * 12, retries=3, concurrency=3)
    assert len(segments) == len(answered) == 12
    assert len(dead) < 6


def test_a_failed_server_gets_a_single_request_after_its_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a dead server that gets all requests, since it has the fewest in flight."""
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    balancer = LoadBalancer(["a", "b"])
    with pytest.raises(EndpointError), balancer.next().track_request():
        raise EndpointError
    with balancer.next().track_request():
        assert balancer.next().url == "b"  # b has more requests in flight, but a rests
    clock[0] += 60
    with balancer.next().track_request() as _, balancer.next().track_request() as _:
        assert [server.in_flight for server in balancer._addresses] == [1, 1]
        assert [balancer.next().url for _ in range(2)] == ["b", "b"]


def check(*urls: str, model: str = MODEL, **settings: Any) -> int | None:
    endpoint_settings = Endpoint(**{"urls": urls, "logprobs": 4, **settings})
    return check_endpoint(endpoint_settings, model, key="teachers.0", vocab_size=VOCAB, token=VOCAB - 1, texts=TEXTS)


def test_every_server_is_checked_before_a_run() -> None:
    """Catches a second server with another model, and a length limit that one of the servers does not have."""
    with (
        endpoint(fine, limit=9) as (short, _),
        endpoint(fine) as (long, _),
        endpoint(fine, model="other") as (different, _),
    ):
        assert check(long, short) == 8
        with pytest.raises(EndpointError, match=f"teachers.0.urls.1={different} serves other and not big; correct"):
            check(long, different)
    with endpoint(fine, limit=None) as (url, _):
        assert check(url) is None


@pytest.mark.parametrize(
    ("respond", "reason"),
    [
        (choice(prompt_logprobs=None), "no log-probabilities of the prompt.*teachers.0.logprobs.*--max-logprobs"),
        (lambda _: (400, {"error": "greater than max allowed"}), "greater than max allowed.*teachers.0.logprobs"),
    ],
)
def test_servers_with_too_few_log_probabilities_are_refused(respond: Responder, reason: str) -> None:
    """Catches an error only at the first step, and retries of a refusal."""
    with endpoint(respond) as (url, bodies), pytest.raises(EndpointError, match=reason):
        check(url)
    assert len(bodies) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_servers_error_does_not_blame_log_probabilities(status: int) -> None:
    """Bug: advice to lower teachers.N.logprobs if the server is busy or broken."""
    reason = rf" status {status}: .*busy.*; see the server's log.*teachers\.0\.urls\.0 out$"
    with endpoint(lambda _: (status, {"error": "busy"})) as (url, _), pytest.raises(EndpointError, match=reason):
        check(url)


def test_a_slow_servers_error_names_an_existing_setting() -> None:
    """Bug: teachers.0.urls.0.request_timeout_s, which does not exist."""

    def late(body: Json) -> tuple[int, Json]:
        time.sleep(0.5)
        return fine(body)

    with (
        endpoint(late) as (url, _),
        pytest.raises(EndpointError, match=rf"{url}.* no answer in 0.1 s \(teachers\.0\.request_timeout_s\)"),
    ):
        check(url, request_timeout_s=0.1)


def test_the_key_is_sent() -> None:
    """Catches requests that a server with --api-key refuses."""
    keys: list[str | None] = []

    class Noting(Handler):
        def _reply(self, status: int, body: Json) -> None:
            keys.append(self.headers.get("Authorization"))
            super()._reply(status, body)

    with endpoint(fine, handler=Noting) as (url, _):
        check(url, api_key="a-key")
        check(url)
    assert keys == ["Bearer a-key"] * (len(keys) // 2) + [None] * (len(keys) // 2)
    assert len(keys) == 2 * (2 + 2 * len(TEXTS))  # models, two tokens, each text alone and in a batch


def test_an_address_without_a_server_is_refused() -> None:
    """Catches a traceback of the HTTP library."""
    with pytest.raises(EndpointError, match=r"teachers.0.urls.0=http://127.0.0.1:1 does not answer.*start the server"):
        check("http://127.0.0.1:1")
