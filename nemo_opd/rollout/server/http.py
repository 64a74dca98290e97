"""HTTP calls to a server: JSON in, JSON out, with limits of time and size."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from httpx2 import AsyncClient, HTTPError, Limits

from nemo_opd.errors import OPDError, RolloutError

MAX_BYTES = 1 << 27
"""Decompressed size of an answer: several times as much as 128k tokens and their prompt with log-probabilities need."""
HEALTH_S = 5.0
"""Limit of a health check."""
_SHOWN = 500
"""Characters of a server's own message in errors."""


class UnusableError(Exception):
    """An answer that cannot be used; the message says why."""


class UnansweredError(UnusableError):
    """No answer in time, or a failure that does not depend on the request."""


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


def open_client(*, trust_env: bool, headers: Mapping[str, str], connections: int | None = None) -> AsyncClient:
    """Return a client without time limits: httpx2's limits apply to each part of an answer, not to the whole.

    connections: largest number of open connections, by default the library's limit.
    """
    limits = Limits(max_connections=connections, max_keepalive_connections=connections) if connections else Limits()
    return AsyncClient(limits=limits, timeout=None, trust_env=trust_env, headers=headers)


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
        client = open_client(trust_env=self.trust_env, headers=self.headers)
        async with asyncio.timeout(timeout_s), client:
            return await fetch(client, method, self.url + path, body)
