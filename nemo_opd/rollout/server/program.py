"""The interface of programs that serve a model, and their shared code."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from nemo_opd.errors import RolloutError
from nemo_opd.rollout.base import Completion, EngineSpec, Request, Sampling
from nemo_opd.rollout.server.completion import Answer, RequestContext
from nemo_opd.rollout.server.http import Http

Json = dict[str, Any]
HOST = "127.0.0.1"
NAME = "student"
"""The model's name on a server that is started here."""
_SEED_BITS = 31
"""Seed bits that all programs use; some programs' random generators drop higher ones."""


class Program(ABC):
    """A serving program: its command line, its requests and answers, and its way to load new weights."""

    command: ClassVar[tuple[str, ...]]
    """Default command that starts the program."""
    environment: ClassVar[Mapping[str, str]]
    path: ClassVar[str]
    """URL path of requests for completions."""
    sees_cuts: ClassVar[bool] = True
    """Whether its log-probabilities include top-k and top-p, and not only the temperature."""
    loads_files: ClassVar[bool] = False
    """Whether it implements `load_files`."""
    hint: ClassVar[str]
    """Options that a user-started server needs, for error messages."""

    @abstractmethod
    def arguments(self, model: str, spec: EngineSpec, port: int, memory_share: float) -> list[str]:
        """Return the arguments that follow the command.

        memory_share: share of each GPU's memory, or of the machine's memory on CPUs, that the server may use in total.
        """

    @abstractmethod
    def body(self, request: Request, sampling: Sampling, terms: RequestContext) -> Json:
        """Return the body of a request for a completion."""

    @abstractmethod
    def answer(self, reply: Json) -> Answer:
        """Read the reply to `body`. Raises KeyError, TypeError or IndexError if it has another form."""

    @abstractmethod
    def raw_body(self, request: Request, completion: Completion, terms: RequestContext) -> Json:
        """Return the body of a request for the raw log-probabilities of a completion.

        The model reads the sampled sequence once, without sampling it again.
        """

    @abstractmethod
    def raw_logprobs(self, reply: Json, completion: Completion) -> object:
        """Read the reply to `raw_body`. Raises KeyError, TypeError or IndexError if it has another form."""

    @abstractmethod
    def load(self, http: Http, folder: Path, version: int) -> None:
        """Load the weights in a folder, and drop all caches of the old weights. Raises RolloutError."""

    def load_files(self, http: Http, files: Sequence[str], version: int) -> bool:
        """Load weights from safetensors files, which may be in a process's memory (/proc/PID/fd/NUMBER).

        Returns False and keeps the old weights if the server cannot read the files. Raises RolloutError.
        """
        raise NotImplementedError

    def sleep(self, http: Http) -> None:
        """Release GPU memory: keep the weights in main memory, and drop the cache. Raises RolloutError."""
        raise NotImplementedError

    def wake(self, http: Http) -> None:
        """Undo `sleep`. Raises RolloutError."""
        raise NotImplementedError


def openai_models(http: Http) -> dict[str, str]:
    """Return name → source of the models that `/v1/models` lists. Raises RolloutError."""
    try:
        cards = http.get("/v1/models").get("data", [])
        return {str(card["id"]): str(card.get("root") or card["id"]) for card in cards}
    except (AttributeError, KeyError, TypeError) as error:
        raise RolloutError(
            f"{http.url}/v1/models does not list models as OpenAI's does; set another rollout.url"
        ) from error


def short_seed(seed: int) -> int:
    """Hash all bits of a seed to 31 bits."""
    return int(np.random.SeedSequence(seed).generate_state(1)[0]) >> (32 - _SEED_BITS)
