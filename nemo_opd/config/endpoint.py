"""Servers that compute a teacher's log-probabilities (methods.md §13)."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from nemo_opd.config.base import Settings


def whole_url(url: str) -> str:
    """Return a server's address. Raises ValueError if it is not one."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        is_whole = False
    if not is_whole:
        raise ValueError("it is not an address of a server; write one such as http://localhost:8000")
    return url


class Endpoint(Settings):
    """Servers of one model. Each can score any text."""

    urls: tuple[str, ...] = Field(min_length=1)
    """Addresses of running servers, without /v1. A request goes to the server with the fewest requests; a server that
    fails gets none until it answers again.
    """
    program: Literal["vllm", "sglang", "openai"] = "vllm"
    """Program of the servers. openai: completions with echo=true and logprobs, with tokens written as token_id:NUMBER
    (vLLM's return_tokens_as_token_ids).
    """
    logprobs: int = Field(20, ge=1)
    """Number of likeliest tokens requested at each position, besides the observed token. vLLM allows up to its
    --max-logprobs, by default 20.
    """
    api_key: str | None = None
    """Key for the servers, sent as a bearer token; `${oc.env:NAME}` reads it from the environment."""
    request_timeout_s: float = Field(300, gt=0)
    """Seconds for the answer to one sequence."""
    retries: int = Field(3, ge=0)
    """Number of times that a failed or unusable request is repeated."""
    concurrency: int = Field(32, ge=1)
    """A rank's requests in flight, over all addresses."""

    @field_validator("urls", mode="before")
    @classmethod
    def one_address_is_a_list_of_one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("urls")
    @classmethod
    def urls_are_whole_and_different(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for i, url in enumerate(urls):
            try:
                whole_url(url)
            except ValueError as error:
                raise ValueError(f"element {i}, {url!r}: {error}") from error
            if urlsplit(url).path.strip("/").split("/")[-1] == "v1":
                raise ValueError(f"element {i}, {url!r}: the path of each request is added to it; leave /v1 out")
            if url in urls[:i]:
                raise ValueError(f"{url} is listed twice; name each server once")
        return urls

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
