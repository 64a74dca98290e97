"""Servers that answer for a teacher (methods.md §13)."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from nemo_opd.config.base import Settings


def whole_url(url: str) -> str:
    """Return a server's address. Raises ValueError where it is none."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is none
        is_whole = False
    if not is_whole:
        raise ValueError("it is no address of a server; write one such as http://localhost:8000")
    return url


class Endpoint(Settings):
    """Servers of one model, each of which can be asked about any text."""

    urls: tuple[str, ...] = Field(min_length=1)
    """Addresses of running servers, without /v1. A request goes to the one that has fewest; where one fails, the others
    get its requests until it answers again.
    """
    program: Literal["vllm", "sglang", "openai"] = "vllm"
    """Program of the servers. openai: completions with echo=true and logprobs, whose tokens are written token_id:NUMBER
    as with vLLM's return_tokens_as_token_ids.
    """
    logprobs: int = Field(20, ge=1)
    """Likeliest tokens that are requested at each position, in addition to the observed token. vLLM allows as many as
    it was started with, --max-logprobs, 20 by default.
    """
    api_key: str | None = None
    """Key that the servers ask for, sent as a bearer token; as `${oc.env:NAME}` it is read from the environment."""
    request_timeout_s: float = Field(300, gt=0)
    """Seconds for the answer to one sequence."""
    retries: int = Field(3, ge=0)
    """Number of times that a request is sent again which failed or came back unusable."""
    concurrency: int = Field(32, ge=1)
    """Requests of a rank under way at once, over all addresses."""

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
                raise ValueError(f"{url} is there twice; name each server once")
        return urls

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
