"""Concurrent requests for completions, each with its retries."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from nemo_opd.errors import RolloutError
from nemo_opd.progress import working
from nemo_opd.rollout.base import Completion
from nemo_opd.rollout.server.http import UnusableError, described, fetch

_CHECK_S = 0.2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 4.0
"""Pauses before a request is sent again, each twice as long as the one before."""
_TRY_AGAIN = {408, 409, 425, 429}
"""Statuses below 500 after which the same request may succeed."""

_Body = dict[str, Any]
Read = Callable[[int, Any], Completion]
"""Function from the number of a request and its reply to a completion.

Raises UnusableError, KeyError, TypeError or IndexError.
"""


class _RefusedError(Exception):
    """A request that the server calls wrong, so that sending it again is of no use."""


@dataclass
class Client:
    """Requests to a server for completions."""

    url: str
    """Address of the completions."""
    concurrency: int
    """Largest number of requests in flight."""
    timeout_s: float
    """Limit of one try of one request."""
    retries: int
    trust_env: bool
    """Whether the environment's proxies are used."""
    retried: int = 0
    """Requests sent again, so far."""

    def complete(self, bodies: Sequence[_Body], read: Read, check: Callable[[], None]) -> list[Completion]:
        """Return one completion for each body, in order.

        check: called regularly meanwhile; what it raises ends all requests. Raises RolloutError for a request whose
        tries all failed; no request is in flight afterwards.
        """
        try:
            return asyncio.run(self._complete(bodies, read, check))
        except BaseExceptionGroup as group:
            raise _first_of(group) from None

    async def _complete(self, bodies: Sequence[_Body], read: Read, check: Callable[[], None]) -> list[Completion]:
        limits = httpx2.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        slots = asyncio.Semaphore(self.concurrency)

        async def complete_one(number: int, body: _Body) -> Completion:
            async with slots:
                completion = await self._with_retries(http, number, body, read, check)
            work.advance()
            return completion

        async def check_regularly() -> None:
            while True:
                check()
                await asyncio.sleep(_CHECK_S)

        with working("asking the server", len(bodies), "requests") as work:
            async with (
                httpx2.AsyncClient(limits=limits, timeout=None, trust_env=self.trust_env) as http,
                asyncio.TaskGroup() as group,
            ):
                checks = group.create_task(check_regularly())
                requests = [group.create_task(complete_one(number, body)) for number, body in enumerate(bodies)]
                completions = await asyncio.gather(*requests)
                checks.cancel()
        return completions

    async def _with_retries(
        self, http: httpx2.AsyncClient, number: int, body: _Body, read: Read, check: Callable[[], None]
    ) -> Completion:
        for attempt in range(self.retries + 1):
            if attempt:
                self.retried += 1
                await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _LONGEST_PAUSE_S))
            try:
                return await self._try(http, number, body, read)
            except _RefusedError as error:
                raise RolloutError(f"{self.url} refused prompt {number}: {error}") from error
            except (UnusableError, httpx2.HTTPError) as error:
                check()  # a server that has died is the better explanation
                reason = described(error)
        tries = f"{self.retries + 1} tries (rollout.retries={self.retries})"
        raise RolloutError(f"{self.url} gave no completion of prompt {number} in {tries}: {reason}")

    async def _try(self, http: httpx2.AsyncClient, number: int, body: _Body, read: Read) -> Completion:
        try:
            async with asyncio.timeout(self.timeout_s):
                reply = await fetch(http, "POST", self.url, body)
        except TimeoutError as error:
            raise UnusableError(f"no answer in {self.timeout_s:g} s (rollout.request_timeout_s)") from error
        if not reply.is_success:
            message = f"status {reply.status}: {reply.start}"
            is_final = reply.status < 500 and reply.status not in _TRY_AGAIN
            raise _RefusedError(message) if is_final else UnusableError(message)
        try:
            return read(number, reply.json())
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise UnusableError(f"an answer of another form: {reply.start}") from error


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the group's first exception, which is why the other tasks were ended."""
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
