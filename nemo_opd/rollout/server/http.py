"""Single calls to a server, for all but completions."""

import asyncio
from typing import Any

import httpx2

from nemo_opd.errors import RolloutError
from nemo_opd.rollout.server.answer import UnusableError
from nemo_opd.rollout.server.body import Reply, asked

HEALTH_S = 5.0
"""For the answer whether a server is healthy."""


class Http:
    """JSON in, JSON out; every failure is a RolloutError that names the address."""

    def __init__(self, url: str, *, timeout_s: float, trust_env: bool, hint: str = "") -> None:
        """timeout_s: of a whole call, however slowly it is answered. trust_env: use the environment's proxies. hint:
        ends the message about a call that is not answered well.
        """
        self.url, self._hint = url.rstrip("/"), hint
        self._timeout_s, self._trust_env = timeout_s, trust_env

    def get(self, path: str) -> Any:
        """What the body says. Raises RolloutError."""
        return self._called("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What the body says; None where it is empty, its text where it is no JSON. Raises RolloutError."""
        return self._called("POST", path, body)

    def is_healthy(self, path: str = "/health") -> bool:
        try:
            return asyncio.run(self._asked("GET", path, None, HEALTH_S)).is_success
        except (httpx2.HTTPError, UnusableError, TimeoutError):
            return False

    def _called(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            reply = asyncio.run(self._asked(method, path, body, self._timeout_s))
        except TimeoutError as error:
            raise RolloutError(f"{self.url}{path}: no whole answer in {self._timeout_s:g} s") from error
        except (httpx2.HTTPError, UnusableError) as error:
            raise RolloutError(f"{self.url}{path}: {described(error)}") from error
        if not reply.is_success:
            hint = f"; {self._hint}" if self._hint else ""
            raise RolloutError(f"{self.url}{path} answered {reply.status}: {reply.start}{hint}")
        return content_of(reply)

    async def _asked(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> Reply:
        # A client's own limits are for each part of an answer, of which there may be any number.
        async with asyncio.timeout(timeout_s), httpx2.AsyncClient(timeout=None, trust_env=self._trust_env) as client:
            return await asked(client, method, self.url + path, body)


def content_of(reply: Reply) -> Any:
    try:
        return reply.json() if reply.content else None
    except ValueError:
        return reply.content.decode(errors="replace")


def described(error: BaseException) -> str:
    """Timeouts and closed connections often come with no words of their own."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
