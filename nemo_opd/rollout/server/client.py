"""HTTP calls to servers: single ones, and many at once to equal servers, with retries and checked answers."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from ssl import SSLContext
from typing import Any, Generic, TypeVar

import numpy as np
from httpx2 import AsyncClient, AsyncHTTPTransport, HTTPError, Limits, create_ssl_context
from numpy.typing import NDArray

from nemo_opd.data.row_types import FinishReason
from nemo_opd.errors import OPDError, RolloutError
from nemo_opd.progress import working
from nemo_opd.rollout.engine_interface import Completion, Request
from nemo_opd.users_code import is_finite, shown

MAX_BYTES = 1 << 27
"""Decompressed size of an answer: several times as much as 128k tokens and their prompt with log-probabilities need."""
HEALTH_S = 5.0
"""Limit of a health check."""
ROUNDING = 1e-3
"""Largest positive log-probability that counts as rounding: servers compute in 32 bits."""
_SHOWN = 500
"""Characters of a server's own message in errors."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 4.0
"""Pauses before a retry; each is twice as long as the one before."""
_LONGEST_REST_S = 30.0
"""Longest pause of a failed server while other servers answer."""
_CHECK_S = 0.2
_TRY_AGAIN = {408, 409, 425, 429}
"""Statuses below 500 that are worth a retry."""
_Answer = TypeVar("_Answer")
_Body = dict[str, Any]


class UnusableError(Exception):
    """An answer that cannot be used; the message says why."""


class UnansweredError(UnusableError):
    """No answer in time, or a failure that does not depend on the request."""


class _RefusedError(Exception):
    """A request that the server rejects, so that retrying cannot help."""


@dataclass(frozen=True, slots=True)
class _Reply:
    """A complete answer."""

    status: int
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def start(self) -> str:
        """First characters in one line, for messages."""
        return " ".join(self.content[: 4 * _SHOWN].decode(errors="replace").split())[:_SHOWN]

    def json(self) -> Any:
        """Parse the content. Raises ValueError for invalid or too deeply nested JSON."""
        try:
            return json.loads(self.content)
        except RecursionError:
            raise ValueError("its nesting is too deep") from None


@dataclass(frozen=True, slots=True)
class Http:
    """Single calls to one server. Every failure raises an `error` that names the address."""

    url: str
    """Address without trailing slash."""
    timeout_s: float
    """Limit of an entire call, even if the answer arrives slowly."""
    trust_env: bool
    """Whether the environment's proxies are used."""
    hint: str = ""
    """End of the message if a call is answered with an error."""
    error: type[OPDError] = RolloutError
    headers: Mapping[str, str] = field(default_factory=dict)
    socket: Path | None = None
    """Unix socket of the server; None if it listens at a port."""

    def get(self, path: str) -> Any:
        """Return the content of the answer. Raises `error`."""
        return self._call("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the content of the answer: None if it is empty, its text if it is not JSON.

        Raises `error`.
        """
        return self._call("POST", path, body)

    def is_healthy(self) -> bool:
        try:
            return asyncio.run(self._fetch("GET", "/health", None, HEALTH_S)).is_success
        except (UnusableError, TimeoutError):
            return False

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            reply = asyncio.run(self._fetch(method, path, body, self.timeout_s))
        except TimeoutError as error:
            raise self.error(f"{self.url}{path}: no complete answer in {self.timeout_s:g} s") from error
        except UnusableError as error:
            raise self.error(f"{self.url}{path}: {error}") from error
        if not reply.is_success:
            hint = f"; {self.hint}" if self.hint else ""
            raise self.error(f"{self.url}{path} answered {reply.status}: {reply.start}{hint}")
        try:
            return reply.json() if reply.content else None
        except ValueError:
            return reply.content.decode(errors="replace")

    async def _fetch(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> _Reply:
        client = _open_client(trust_env=self.trust_env, headers=self.headers, socket=self.socket)
        async with asyncio.timeout(timeout_s), client:
            return await fetch(client, method, self.url + path, body)


def _open_client(
    *, trust_env: bool, headers: Mapping[str, str], socket: Path | None, connections: int | None = None
) -> AsyncClient:
    """Return a client without time limits: httpx2's limits apply to each part of an answer, not to the whole.

    connections: largest number of open connections, by default the library's limit.
    """
    limits = Limits(max_connections=connections, max_keepalive_connections=connections) if connections else Limits()
    certificates = _certificates(trust_env)
    transport = None if socket is None else AsyncHTTPTransport(uds=str(socket), limits=limits, verify=certificates)
    return AsyncClient(
        limits=limits,
        timeout=None,
        trust_env=trust_env,
        headers=headers,
        transport=transport,
        verify=certificates,
    )


@cache
def _certificates(trust_env: bool) -> SSLContext:
    """Return the trusted certificates, which take 30 ms to read. trust_env: the environment's can replace them."""
    return create_ssl_context(trust_env=trust_env)


async def fetch(client: AsyncClient, method: str, url: str, body: Any, max_bytes: int | None = None) -> _Reply:
    """Send a request and read its answer.

    Raises UnansweredError if the request fails, and UnusableError for an answer of more than `max_bytes`, by default
    `MAX_BYTES`.
    """
    limit = MAX_BYTES if max_bytes is None else max_bytes
    try:
        async with client.stream(method, url, json=body) as response:
            content = bytearray()
            async for part in response.aiter_bytes():
                content += part
                if len(content) > limit:
                    raise UnusableError(f"its answer is longer than {limit >> 20} MiB")
            return _Reply(response.status_code, bytes(content))
    except HTTPError as error:  # timeouts and closed connections often have no message
        name = type(error).__name__
        raise UnansweredError(f"{name}: {error}" if str(error) else name) from error


class _Address:
    """A server's address, and the state of its requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_flight = self.sent = self.failures = 0
        """Requests in flight, requests so far, and failures since the last answer."""
        self.rests_until = 0.0

    @contextmanager
    def track_request(self) -> Iterator[None]:
        """Count a request; an exception counts as a failure."""
        self.in_flight += 1
        self.sent += 1
        try:
            yield
        except Exception:
            self.failures += 1
            self.rests_until = time.monotonic() + _pause_s(self.failures, _LONGEST_REST_S)
            raise
        else:
            self.failures = 0
        finally:
            self.in_flight -= 1


class LoadBalancer:
    """A load balancer over equal servers. A failed server rests for a while, and is then tried with one request."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._addresses = [_Address(url) for url in urls]

    def next(self, *, is_retry: bool = False) -> _Address:
        """Return the address with the fewest requests; if all rest, the one whose rest ends first.

        is_retry: the request has failed before, so it goes to a server without failures if there is one.
        """
        now = time.monotonic()
        sound = [server for server in self._addresses if not server.failures]
        rested = [
            server
            for server in self._addresses
            if server.failures and now >= server.rests_until and not server.in_flight
        ]
        if candidates := sound if sound and is_retry else sound + rested:
            return min(candidates, key=lambda server: (server.in_flight, server.sent))
        return min(self._addresses, key=lambda server: server.rests_until)


def _pause_s(failures: int, longest: float = _LONGEST_PAUSE_S) -> float:
    """Return the seconds to wait after this number of failures, 1 or more."""
    return min(_FIRST_PAUSE_S * 2.0 ** min(failures - 1, 30), longest)


@dataclass(kw_only=True)
class Client(Generic[_Answer]):
    """A client of several servers of one model. A request goes to the least loaded server, a retry to another one."""

    urls: Sequence[str]
    """Addresses that requests are sent to."""
    concurrency: int
    """Largest number of requests in flight."""
    timeout_s: float
    """Limit per try of a request."""
    retries: int
    trust_env: bool
    """Whether the environment's proxies are used."""
    key: str = "rollout"
    """Section of the settings, for error messages."""
    error: type[OPDError] = RolloutError
    headers: Mapping[str, str] = field(default_factory=dict)
    max_bytes: int | None = None
    """Size limit of an answer; `MAX_BYTES` if None."""
    socket: Path | None = None
    """Unix socket of the only server; None if servers listen at ports."""
    retried: int = 0
    """Requests sent again, so far."""
    _balancer: LoadBalancer = field(init=False)

    def __post_init__(self) -> None:
        self._balancer = LoadBalancer(self.urls)

    def complete(
        self, bodies: Sequence[_Body], read: Callable[[int, Any], _Answer], check: Callable[[], None] = lambda: None
    ) -> list[_Answer]:
        """Return one answer per body, in order.

        read: turns a request's number and reply into an answer; raises UnusableError, KeyError, TypeError, IndexError,
        AttributeError or ValueError for an unusable reply. check: called regularly meanwhile; an exception in it ends
        all requests. Raises `error`, caused by the last failure, if all tries of a request fail; no request is in
        flight afterwards.
        """
        try:
            return asyncio.run(self._complete(bodies, read, check))
        except BaseExceptionGroup as group:
            first = _first_of(group)
            raise first from first.__cause__

    async def _complete(
        self, bodies: Sequence[_Body], read: Callable[[int, Any], _Answer], check: Callable[[], None]
    ) -> list[_Answer]:
        slots = asyncio.Semaphore(self.concurrency)

        async def complete_one(number: int, body: _Body) -> _Answer:
            async with slots:
                answer = await self._with_retries(http, number, body, read, check)
            work.advance()
            return answer

        async def check_regularly() -> None:
            while True:
                check()
                await asyncio.sleep(_CHECK_S)

        with working("asking the server", len(bodies), "requests") as work:
            async with (
                _open_client(
                    trust_env=self.trust_env,
                    headers=self.headers,
                    socket=self.socket,
                    connections=self.concurrency,
                ) as http,
                asyncio.TaskGroup() as group,
            ):
                checks = group.create_task(check_regularly())
                requests = [group.create_task(complete_one(number, body)) for number, body in enumerate(bodies)]
                answers = await asyncio.gather(*requests)
                checks.cancel()
        return answers

    async def _with_retries(
        self,
        http: AsyncClient,
        number: int,
        body: _Body,
        read: Callable[[int, Any], _Answer],
        check: Callable[[], None],
    ) -> _Answer:
        for attempt in range(self.retries + 1):
            if attempt:
                self.retried += 1
                await asyncio.sleep(_pause_s(attempt))
            address = self._balancer.next(is_retry=attempt > 0)
            try:
                with address.track_request():
                    return await self._try(http, address, number, body, read)
            except _RefusedError as error:
                raise self.error(f"{address.url} refused prompt {number}: {error}") from error
            except UnusableError as error:
                check()  # the server's death is the better explanation
                last = error
        tries = f"{self.retries + 1} tries ({self.key}.retries={self.retries})" if self.retries else "1 try"
        raise self.error(f"{address.url} gave no completion of prompt {number} in {tries}: {last}") from last

    async def _try(
        self, http: AsyncClient, address: _Address, number: int, body: _Body, read: Callable[[int, Any], _Answer]
    ) -> _Answer:
        try:
            async with asyncio.timeout(self.timeout_s):
                reply = await fetch(http, "POST", address.url, body, self.max_bytes)
        except TimeoutError as error:
            raise UnansweredError(f"no answer in {self.timeout_s:g} s ({self.key}.request_timeout_s)") from error
        if not reply.is_success:
            message = f"status {reply.status}: {reply.start}"
            is_final = reply.status < 500 and reply.status not in _TRY_AGAIN
            raise _RefusedError(message) if is_final else UnansweredError(message)
        try:
            return read(number, reply.json())
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise UnusableError(f"an answer of another form: {reply.start}") from error


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the group's first exception, which ended the other tasks."""
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer, unchecked."""

    ids: object
    logprobs: object
    """Log-probabilities under the sampling policy: with temperature and, if the program `sees_cuts`, with top-k and
    top-p.
    """
    finish_reason: str | None
    model: str | None
    """Name of the model; None if the program does not report it."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Properties of the served model that requests use and answers are checked against."""

    model: str
    """The model's name on the server."""
    end_ids: frozenset[int]
    vocab_size: int
    """Head rows that are tokens; later rows must not be sampled."""
    head_size: int
    """Head rows; `vocab_size` if unknown."""

    @property
    def bias(self) -> dict[str, Any]:
        """OpenAI's `logit_bias` that suppresses head rows without a token; empty if all rows are tokens."""
        unused_rows = range(self.vocab_size, self.head_size)
        return {"logit_bias": {str(row): -100.0 for row in unused_rows}} if unused_rows else {}

    def completion(self, request: Request, answer: Answer, version: int) -> Completion:
        """Convert an answer to a completion by weights of `version`. Raises UnusableError.

        The raw log-probabilities are also the answer's, which is right unless sampling is warped.
        """
        if answer.model not in (None, self.model):
            raise UnusableError(f"it is by the model {answer.model!r} and not by {self.model!r}")
        ids = self._checked_ids(answer.ids, request.max_new_tokens)
        behaviour = checked_logprobs(answer.logprobs, len(ids))
        return Completion(
            ids=np.array(ids, np.int32),
            logprobs=behaviour,
            behaviour_logprobs=behaviour,
            finish_reason=self._finish_reason(ids, answer.finish_reason, request),
            version=version,
        )

    def _checked_ids(self, ids: object, max_new_tokens: int) -> list[int]:
        if not isinstance(ids, list) or not ids or not all(isinstance(token, int) for token in ids):
            raise UnusableError("it has no token ids")
        if len(ids) > max_new_tokens:
            raise UnusableError(f"it has {len(ids)} tokens, and at most {max_new_tokens} were requested")
        if wrong := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise UnusableError(f"token id {shown(wrong[0])} is outside the vocabulary of {self.vocab_size}")
        if any(token in self.end_ids for token in ids[:-1]):
            raise UnusableError("it continues after a token that ends the turn")
        return ids

    def _finish_reason(self, ids: list[int], reason: str | None, request: Request) -> FinishReason:
        if ids[-1] in self.end_ids or (request.stop and reason == "stop"):
            return "stop"
        if reason != "length":
            raise UnusableError(
                f"it ended ({reason}) with token {ids[-1]}, which is not an end token ({sorted(self.end_ids)}); the "
                "server uses other stop tokens"
            )
        if len(ids) < request.max_new_tokens:
            raise UnusableError(
                f"it ended (length) after {len(ids)} of {request.max_new_tokens} tokens: the server's context is too "
                f"short for a prompt of {len(request.prompt_ids)}"
            )
        return "length"


def checked_logprobs(logprobs: object, count: int) -> NDArray[np.float32]:
    """Return log-probabilities as an array [count]. Raises UnusableError unless they are `count` finite numbers ≤ 0."""
    if not isinstance(logprobs, list) or not all(isinstance(value, int | float) for value in logprobs):
        raise UnusableError("it has no log-probabilities of its tokens")
    if len(logprobs) != count:
        raise UnusableError(f"it has {count} tokens and {len(logprobs)} log-probabilities")
    if wrong := [value for value in logprobs if not is_finite(value) or value > ROUNDING]:
        raise UnusableError(f"{shown(wrong[0])} is not a log-probability")
    return np.array(logprobs, np.float32)
