"""A server's answer, read to a limit."""

import json
from dataclasses import dataclass
from typing import Any

import httpx2

from nemo_opd.rollout.server.answer import UnusableError

MAX_BYTES = 1 << 27
"""Of an answer, unpacked: several times that of 128k tokens with their log-probabilities and the prompt's."""
SHOWN = 500
"""Characters of a server's own message."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def start(self) -> str:
        """Its first characters in one line, for messages."""
        return " ".join(self.content[: 4 * SHOWN].decode(errors="replace").split())[:SHOWN]

    def json(self) -> Any:
        """Raises ValueError for what is no JSON, also where its nesting is too deep to be read."""
        try:
            return json.loads(self.content)
        except RecursionError:
            raise ValueError("its nesting is too deep") from None


async def asked(client: httpx2.AsyncClient, method: str, url: str, body: Any) -> Reply:
    """Send a request and read its answer.

    Raises httpx2.HTTPError, and UnusableError for an answer of more than `MAX_BYTES`.
    """
    async with client.stream(method, url, json=body) as response:
        content = bytearray()
        async for part in response.aiter_bytes():
            content += part
            if len(content) > MAX_BYTES:
                raise UnusableError(f"its answer is longer than {MAX_BYTES >> 20} MiB")
        return Reply(response.status_code, bytes(content))
