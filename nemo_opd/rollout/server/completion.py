"""Checks of server answers, and their conversion to completions."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_opd.data.record import FinishReason
from nemo_opd.rollout.base import Completion, Request
from nemo_opd.rollout.server.http import UnusableError
from nemo_opd.users_code import is_finite, shown

ROUNDING = 1e-3
"""Largest positive log-probability that counts as rounding: servers compute in 32 bits."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer, unchecked."""

    ids: object
    logprobs: object
    """Log-probabilities under the sampling policy: with temperature and, if the program `sees_cuts`, with top-k and
    top-p.
    """
    finish_reason: str | None
    model: str | None
    """Name of the model; None if the program does not report it."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Properties of the served model that requests use and answers are checked against."""

    model: str
    """The model's name on the server."""
    end_ids: frozenset[int]
    vocab_size: int
    """Head rows that are tokens; later rows must not be sampled."""
    head_size: int
    """Head rows; `vocab_size` if unknown."""

    @property
    def bias(self) -> dict[str, Any]:
        """OpenAI's `logit_bias` that suppresses head rows without a token; empty if all rows are tokens."""
        unused_rows = range(self.vocab_size, self.head_size)
        return {"logit_bias": {str(row): -100.0 for row in unused_rows}} if unused_rows else {}

    def completion(self, request: Request, answer: Answer, version: int) -> Completion:
        """Convert an answer to a completion by weights of `version`. Raises UnusableError.

        The raw log-probabilities are also the answer's, which is right unless sampling is warped.
        """
        if answer.model not in (None, self.model):
            raise UnusableError(f"it is by the model {answer.model!r} and not by {self.model!r}")
        ids = self._checked_ids(answer.ids, request.max_new_tokens)
        behaviour = checked_logprobs(answer.logprobs, len(ids))
        return Completion(
            ids=np.array(ids, np.int32),
            logprobs=behaviour,
            behaviour_logprobs=behaviour,
            finish_reason=self._finish_reason(ids, answer.finish_reason, request),
            version=version,
        )

    def _checked_ids(self, ids: object, max_new_tokens: int) -> list[int]:
        if not isinstance(ids, list) or not ids or not all(isinstance(token, int) for token in ids):
            raise UnusableError("it has no token ids")
        if len(ids) > max_new_tokens:
            raise UnusableError(f"it has {len(ids)} tokens, and at most {max_new_tokens} were requested")
        if wrong := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise UnusableError(f"token id {shown(wrong[0])} is outside the vocabulary of {self.vocab_size}")
        if any(token in self.end_ids for token in ids[:-1]):
            raise UnusableError("it continues after a token that ends the turn")
        return ids

    def _finish_reason(self, ids: list[int], reason: str | None, request: Request) -> FinishReason:
        if ids[-1] in self.end_ids or (request.stop and reason == "stop"):
            return "stop"
        if reason != "length":
            raise UnusableError(
                f"it ended ({reason}) with token {ids[-1]}, which is not an end token ({sorted(self.end_ids)}); the "
                "server uses other stop tokens"
            )
        if len(ids) < request.max_new_tokens:
            raise UnusableError(
                f"it ended (length) after {len(ids)} of {request.max_new_tokens} tokens: the server's context is too "
                f"short for a prompt of {len(request.prompt_ids)}"
            )
        return "length"


def checked_logprobs(logprobs: object, count: int) -> NDArray[np.float32]:
    """Return log-probabilities as an array [count]. Raises UnusableError unless they are `count` finite numbers ≤ 0."""
    if not isinstance(logprobs, list) or not all(isinstance(value, int | float) for value in logprobs):
        raise UnusableError("it has no log-probabilities of its tokens")
    if len(logprobs) != count:
        raise UnusableError(f"it has {count} tokens and {len(logprobs)} log-probabilities")
    if wrong := [value for value in logprobs if not is_finite(value) or value > ROUNDING]:
        raise UnusableError(f"{shown(wrong[0])} is not a log-probability")
    return np.array(logprobs, np.float32)
