"""Single calls to a server, for all but completions."""

from types import TracebackType
from typing import Any, Self

import httpx2

from nemo_opd.errors import RolloutError

SHOWN = 500
"""Characters of a server's own message."""


class Http:
    """JSON in, JSON out; every failure is a RolloutError that names the address."""

    def __init__(self, url: str, *, timeout_s: float, trust_env: bool, hint: str = "") -> None:
        """trust_env: use the environment's proxies. hint: ends the message about a call that is not answered well."""
        self.url, self._hint = url.rstrip("/"), hint
        self._client = httpx2.Client(base_url=self.url, timeout=timeout_s, trust_env=trust_env)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.close()

    def get(self, path: str) -> Any:
        """What the body says. Raises RolloutError."""
        return self._called("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What the body says; None where it is empty, its text where it is no JSON. Raises RolloutError."""
        return self._called("POST", path, body)

    def is_healthy(self, path: str = "/health") -> bool:
        try:
            return self._client.get(path, timeout=5.0).is_success
        except httpx2.TransportError:
            return False

    def _called(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            response = self._client.request(method, path, json=body)
        except httpx2.HTTPError as error:
            raise RolloutError(f"{self.url}{path}: {described(error)}") from error
        if not response.is_success:
            hint = f"; {self._hint}" if self._hint else ""
            raise RolloutError(f"{self.url}{path} answered {response.status_code}: {response.text[:SHOWN]}{hint}")
        return body_of(response)


def body_of(response: httpx2.Response) -> Any:
    try:
        return response.json() if response.content else None
    except ValueError:
        return response.text


def described(error: BaseException) -> str:
    """Timeouts and closed connections often come with no words of their own."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
