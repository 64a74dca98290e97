"""Many requests at once, each with its retries."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from nemo_opd.errors import RolloutError
from nemo_opd.progress import Work, working
from nemo_opd.rollout.base import Completion
from nemo_opd.rollout.server.answer import UnusableError
from nemo_opd.rollout.server.body import asked
from nemo_opd.rollout.server.http import described

WATCH_S = 0.2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 4.0
"""Before a request is tried again: twice as long each time."""
TRY_AGAIN = {408, 409, 425, 429}
"""Statuses below 500 with which the same request may be answered another time."""

Body = dict[str, Any]
Read = Callable[[int, Any], Completion]
"""The completion in the reply to a request, by its number. Raises UnusableError, KeyError, TypeError, IndexError."""


class FinalError(Exception):
    """The server's word that a request is wrong: to ask again is no use."""


@dataclass
class Client:
    """Asks a server for completions."""

    url: str
    """Of the completions."""
    concurrency: int
    """Requests under way at once."""
    timeout_s: float
    """Of one try of one request."""
    retries: int
    trust_env: bool
    """Use the environment's proxies."""
    retried: int = 0
    """Tries after a first that failed, of all requests so far."""

    def complete(self, bodies: Sequence[Body], read: Read, check: Callable[[], None]) -> list[Completion]:
        """One completion a body, in order.

        check: called all the while; what it raises ends all. Raises RolloutError for a request that had all its tries;
        no request is under way afterwards.
        """
        try:
            with working("asking the server", len(bodies), "requests") as work:
                return asyncio.run(self._all(bodies, counting(read, work), check))
        except BaseExceptionGroup as group:
            raise first_of(group) from None

    async def _all(self, bodies: Sequence[Body], read: Read, check: Callable[[], None]) -> list[Completion]:
        limits = httpx2.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        turn = asyncio.Semaphore(self.concurrency)
        async with (
            httpx2.AsyncClient(limits=limits, timeout=None, trust_env=self.trust_env) as http,
            asyncio.TaskGroup() as group,
        ):
            watch = group.create_task(watched(check))
            tries = [group.create_task(self._one(http, turn, i, body, read, check)) for i, body in enumerate(bodies)]
            completions = await asyncio.gather(*tries)
            watch.cancel()
        return completions

    async def _one(
        self,
        http: httpx2.AsyncClient,
        turn: asyncio.Semaphore,
        number: int,
        body: Body,
        read: Read,
        check: Callable[[], None],
    ) -> Completion:
        async with turn:
            for attempt in range(self.retries + 1):
                if attempt:
                    self.retried += 1
                    await asyncio.sleep(min(FIRST_PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S))
                try:
                    return await self._try(http, number, body, read)
                except FinalError as error:
                    raise RolloutError(f"{self.url} refused prompt {number}: {error}") from error
                except (UnusableError, httpx2.HTTPError) as error:
                    # A server that is gone is the better word for why.
                    check()
                    reason = error
        tries = f"{self.retries + 1} tries (rollout.retries={self.retries})"
        raise RolloutError(f"{self.url} gave no completion of prompt {number} in {tries}: {described_reason(reason)}")

    async def _try(self, http: httpx2.AsyncClient, number: int, body: Body, read: Read) -> Completion:
        try:
            async with asyncio.timeout(self.timeout_s):
                reply = await asked(http, "POST", self.url, body)
        except TimeoutError as error:
            raise UnusableError(f"no answer in {self.timeout_s:g} s (rollout.request_timeout_s)") from error
        if not reply.is_success:
            said = f"status {reply.status}: {reply.start}"
            is_final = reply.status < 500 and reply.status not in TRY_AGAIN
            raise FinalError(said) if is_final else UnusableError(said)
        try:
            return read(number, reply.json())
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise UnusableError(f"an answer of another form: {reply.start}") from error


def counting(read: Read, work: Work) -> Read:
    """As `read`, and each answer that it accepts advances the work."""

    def counted(number: int, reply: Any) -> Completion:
        completion = read(number, reply)
        work.advance()
        return completion

    return counted


async def watched(check: Callable[[], None]) -> None:
    while True:
        check()
        await asyncio.sleep(WATCH_S)


def described_reason(reason: Exception) -> str:
    return str(reason) if isinstance(reason, UnusableError) else described(reason)


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """All of the group's failed as one; the first is why the others were ended."""
    first = group.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first
