"""Answers that are too long, too slow or malformed are one-line errors, in time."""

import gzip
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import parse_headers

import numpy as np
import pytest

from nemo_opd.errors import RolloutError
from nemo_opd.rollout.engine_interface import Completion, Request
from nemo_opd.rollout.server.client import Client, Http, RequestContext
from nemo_opd.rollout.server.server_process import openai_models
from nemo_opd.rollout.server.vllm import VLLM

Answers = Callable[[socket.socket], None]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
LONG_S = 60.0


@contextmanager
def server(answer: Answers) -> Iterator[str]:
    """Yield the address of a server that sends the bytes of `answer` to every request."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=respond, args=(connection,), daemon=True).start()

        def respond(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                receive_request(connection)
                answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def receive_request(connection: socket.socket) -> None:
    """Read a request to its end, since closing the connection earlier may lose its answer."""
    with connection.makefile("rb") as request:
        request.readline()
        headers = parse_headers(request)
        request.read(int(headers.get("Content-Length", 0)))


def sends(content: str | bytes, *headers: bytes) -> Answers:
    data = content.encode() if isinstance(content, str) else content
    head = b"".join((HEAD, *headers, b"Content-Length: %d\r\n\r\n" % len(data)))
    return lambda connection: connection.sendall(head + data)


def drips(start: bytes) -> Answers:
    """Return an answer that sends a byte every 20 ms without end."""
    ended = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.sendall(start)
        while not ended.wait(0.02):
            connection.sendall(b" ")

    return answer


def choice(**changes: object) -> str:
    fields = {"token_ids": [5, 2], "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.1, -0.2]}}
    return json.dumps({"model": "m", "choices": [fields | changes]})


EXPECTED = RequestContext("m", frozenset({2}), 100, 100)


def completed(answer: Answers, timeout_s: float = LONG_S) -> Completion:
    request = Request(np.array([1], np.int32), max_new_tokens=4, seed=0)
    with server(answer) as url:
        client: Client[Completion] = Client(
            urls=[url + "/v1/completions"], concurrency=1, timeout_s=timeout_s, retries=0, trust_env=False
        )
        (completion,) = client.complete(
            [{}], lambda _, reply: EXPECTED.completion(request, VLLM().answer(reply), 0), lambda: None
        )
    return completion


def refusal(answer: Answers, timeout_s: float = LONG_S) -> str:
    with pytest.raises(RolloutError) as caught:
        completed(answer, timeout_s)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_opd.rollout.server.client.MAX_BYTES", 1 << 20)


def test_a_valid_answer() -> None:
    assert completed(sends(choice())).ids.tolist() == [5, 2]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[" * 200_000 + "]" * 200_000, "an answer of another form: [[["),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "an answer of another form: {"),
        ('{"choices":' + "9" * 100_000 + "}", "an answer of another form"),
        ("<html>\n<p>no</p>\n" * 50, "an answer of another form: <html> <p>no</p> <html>"),
        (choice(logprobs={"token_logprobs": [-(10**400), -1]}), "is not a log-probability"),
        (choice(token_ids=[10**400, 2]), "is outside the vocabulary of 100"),
        (choice(token_ids=[5, 6], finish_reason="length"), r"ended (length) after 2 of 4 tokens"),
    ],
    ids=["deep list", "deep object", "long number", "lines", "log-probability", "token", "cut"],
)
def test_a_malformed_answer(content: str, reason: str) -> None:
    assert reason in refusal(sends(content))


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_that_is_too_long_is_not_read_to_its_end(status: int) -> None:
    """Bug: the server's answer determines the run's memory."""
    endless = HEAD.replace(b"200 OK", b"%d OK" % status) + b"\r\n"

    def answer(connection: socket.socket) -> None:
        connection.sendall(endless)
        while True:
            connection.sendall(bytes(1 << 16))

    assert "its answer is longer than 1 MiB" in refusal(answer)


@pytest.mark.usefixtures("small_limit")
def test_the_size_limit_applies_to_decompressed_answers() -> None:
    packed = gzip.compress(b" " * (1 << 24))
    assert "its answer is longer than 1 MiB" in refusal(sends(packed, b"Content-Encoding: gzip\r\n"))


@pytest.mark.parametrize(
    "start", [b"HTTP/1.1 200 OK\r\nX: ", HEAD + b"Content-Length: 100000\r\n\r\n"], ids=["head", "body"]
)
def test_a_slow_answer_has_a_total_limit(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a limit for each part does not limit an answer of many parts."""
    assert "no answer in 0.2 s (rollout.request_timeout_s)" in refusal(drips(start), 0.2)
    monkeypatch.setattr("nemo_opd.rollout.server.client.HEALTH_S", 0.2)
    with server(drips(start)) as url:
        calls = Http(url, timeout_s=0.2, trust_env=False)
        assert not calls.is_healthy()
        with pytest.raises(RolloutError, match=f"{url}/v1/models: no complete answer in 0.2 s"):
            calls.get("/v1/models")


@pytest.mark.parametrize("content", ["[]", "hi", "[" * 200_000, '{"data": 3}', '{"data": [3]}', '{"data": [{}]}', ""])
def test_a_malformed_list_of_models(content: str) -> None:
    with server(sends(content)) as url, pytest.raises(RolloutError, match="/v1/models does not list models"):
        openai_models(Http(url, timeout_s=LONG_S, trust_env=False))


@pytest.mark.parametrize("answer", [sends(b"\0" * 99), sends("x", b"Content-Encoding: gzip\r\n"), lambda _: None])
def test_an_answer_that_is_not_http_or_is_damaged(answer: Answers) -> None:
    with server(answer) as url:
        calls = Http(url, timeout_s=LONG_S, trust_env=False)
        calls.is_healthy()
        with pytest.raises(RolloutError):
            openai_models(calls)
