"""What the programs that serve a model have in common, seen from here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nemo_opd.errors import RolloutError
from nemo_opd.rollout.base import Completion, Request, Sampling
from nemo_opd.rollout.server.answer import Answer
from nemo_opd.rollout.server.http import Http

Json = dict[str, Any]
HOST = "127.0.0.1"
SEED_BITS = 31
"""Some programs' generators leave out what is above, and would draw the same for seeds that differ there."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What is to be served, and where."""

    model: str
    """A folder or a hub name."""
    dtype: str
    max_length: int | None
    """Tokens of prompt and response together; by default the model's own limit."""
    port: int
    fp32_logits: bool
    """The head's output is not rounded to `dtype`."""
    memory_share: float
    """Of each GPU's memory, or of the machine's on CPUs, for weights, cache and all else."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What is the same in all requests."""

    model: str
    """The name the server gives it."""
    end_ids: Sequence[int]
    vocab_size: int
    """Rows of the head that are tokens; those behind them must not be sampled."""
    head_size: int
    """Rows of the head; `vocab_size` where it is not known."""

    @property
    def bias(self) -> Json:
        """In the form of OpenAI's `logit_bias`, what keeps those out that are no tokens; nothing where all are."""
        no_tokens = range(self.vocab_size, self.head_size)
        return {"logit_bias": {str(each): -100.0 for each in no_tokens}} if no_tokens else {}


class Program(Protocol):
    """One of the programs: its command line, its requests, its answers, and how it takes new weights."""

    command: tuple[str, ...]
    """Starts it where the user names no other."""
    environment: Mapping[str, str]
    path: str
    """Of the requests for a completion."""
    max_concurrency: int | None
    sees_cuts: bool
    """Whether its log-probabilities are those after top-k and top-p, and not only after the temperature."""
    loads_files: bool = False
    """Whether it has a `load_files` of its own."""
    hint: str
    """How it must have been started, for errors about one that was not started by us."""

    def name(self, model: str) -> str:
        """What it calls the model when started by us."""
        ...

    def arguments(self, launch: Launch) -> list[str]:
        """Follow the command."""
        ...

    def body(self, request: Request, sampling: Sampling, terms: Terms) -> Json:
        """Of a request for a completion."""
        ...

    def answer(self, reply: Json) -> Answer:
        """Of the reply to it. Raises KeyError, TypeError or IndexError where the reply is of another form."""
        ...

    def raw_body(self, request: Request, completion: Completion, terms: Terms) -> Json | None:
        """Of a second request, for the raw log-probabilities of what was sampled; None where the first answer has them.

        The model reads the sequence once, without sampling it again.
        """
        ...

    def raw_logprobs(self, reply: Json, completion: Completion) -> object:
        """Of the tokens, in the reply to it. Raises KeyError, TypeError or IndexError where it is of another form."""
        ...

    def served(self, http: Http) -> dict[str, str] | None:
        """Name → what was loaded, of the models it serves; None where it loads whatever a request names."""
        ...

    def load(self, http: Http, name: str, folder: Path, version: int) -> str:
        """Have it sample with the weights in a folder from now on, and with nothing cached of the old ones.

        Returns the model's name from now on. Raises RolloutError.
        """
        ...

    def load_files(self, http: Http, files: Sequence[str], version: int) -> bool:
        """The same with weights in safetensors files alone, which may be in a process's memory (/proc/PID/fd/NUMBER).

        Returns False, with the weights as before, where the server cannot read them. Raises RolloutError.
        """
        return False


def openai_models(http: Http) -> dict[str, str]:
    """What `/v1/models` lists."""
    try:
        listed = http.get("/v1/models").get("data", [])
        return {str(each["id"]): str(each.get("root") or each["id"]) for each in listed}
    except (AttributeError, KeyError, TypeError) as error:
        raise RolloutError(
            f"{http.url}/v1/models does not list models as OpenAI's does; give another rollout.url"
        ) from error


def short_seed(seed: int) -> int:
    """Of `SEED_BITS`, by all of the seed's bits."""
    return int(np.random.SeedSequence(seed).generate_state(1)[0]) >> (32 - SEED_BITS)
