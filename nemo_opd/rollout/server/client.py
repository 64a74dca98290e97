"""Concurrent requests to servers, with retries."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from httpx2 import AsyncClient

from nemo_opd.errors import OPDError, RolloutError
from nemo_opd.progress import working
from nemo_opd.rollout.server.http import UnansweredError, UnusableError, fetch, open_client
from nemo_opd.rollout.server.spread import Address, LoadBalancer, pause_s

_CHECK_S = 0.2
_TRY_AGAIN = {408, 409, 425, 429}
"""Statuses below 500 that are worth a retry."""

_Answer = TypeVar("_Answer")
_Body = dict[str, Any]


class _RefusedError(Exception):
    """A request that the server rejects, so that retrying cannot help."""


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
    """Size limit of an answer; `http.MAX_BYTES` if None."""
    retried: int = 0
    """Requests sent again, so far."""
    _spread: LoadBalancer = field(init=False)

    def __post_init__(self) -> None:
        self._spread = LoadBalancer(self.urls)

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
                open_client(trust_env=self.trust_env, headers=self.headers, connections=self.concurrency) as http,
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
                await asyncio.sleep(pause_s(attempt))
            address = self._spread.next(is_retry=attempt > 0)
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
        self, http: AsyncClient, address: Address, number: int, body: _Body, read: Callable[[int, Any], _Answer]
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
