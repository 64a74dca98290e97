"""Answers of a server, checked and made completions."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_opd.data.record import FinishReason
from nemo_opd.rollout.base import Completion, Request
from nemo_opd.rollout.server.http import UnusableError
from nemo_opd.users_code import is_finite, shown

ROUNDING = 1e-3
"""Largest log-probability that is taken for 0: servers compute in 32 bits."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer, unchecked."""

    ids: object
    logprobs: object
    """Log-probabilities by the policy that sampled, after the temperature and, where the program `sees_cuts`, top-k and
    top-p.
    """
    finish_reason: str | None
    model: str | None
    """Name of the model; None where the program does not report it."""
    raw_logprobs: object = None
    """Log-probabilities by the model, at temperature 1; None where they take another request."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Facts that requests by one version of the weights share, and that answers must fit."""

    model: str
    """Name that the server gives the model."""
    end_ids: frozenset[int]
    vocab_size: int
    """Rows of the head that are tokens; later ones must not be sampled."""
    head_size: int
    """Rows of the head; `vocab_size` where it is not known."""

    @property
    def bias(self) -> dict[str, Any]:
        """OpenAI's `logit_bias` against rows that are no tokens; empty where all are tokens."""
        no_tokens = range(self.vocab_size, self.head_size)
        return {"logit_bias": {str(each): -100.0 for each in no_tokens}} if no_tokens else {}

    def completion(self, request: Request, answer: Answer, version: int) -> Completion:
        """Return the answer as a completion by weights of `version`. Raises UnusableError."""
        if answer.model not in (None, self.model):
            raise UnusableError(f"it is by the model {answer.model!r} and not by {self.model!r}")
        ids = self._checked_ids(answer.ids, request.max_new_tokens)
        behaviour = checked_logprobs(answer.logprobs, len(ids))
        return Completion(
            ids=np.array(ids, np.int32),
            logprobs=behaviour if answer.raw_logprobs is None else checked_logprobs(answer.raw_logprobs, len(ids)),
            behaviour_logprobs=behaviour,
            finish_reason=self._finish_reason(ids, answer.finish_reason, request),
            version=version,
        )

    def _checked_ids(self, ids: object, max_new_tokens: int) -> list[int]:
        if not isinstance(ids, list) or not ids or not all(isinstance(each, int) for each in ids):
            raise UnusableError("it has no token ids")
        if len(ids) > max_new_tokens:
            raise UnusableError(f"it has {len(ids)} tokens where at most {max_new_tokens} were asked for")
        if wrong := [each for each in ids if not 0 <= each < self.vocab_size]:
            raise UnusableError(f"token id {shown(wrong[0])} is outside the vocabulary of {self.vocab_size}")
        if any(each in self.end_ids for each in ids[:-1]):
            raise UnusableError("it goes on after a token that ends the turn")
        return ids

    def _finish_reason(self, ids: list[int], reason: str | None, request: Request) -> FinishReason:
        if ids[-1] in self.end_ids or (request.stop and reason == "stop"):
            return "stop"
        if reason != "length":
            raise UnusableError(
                f"it ended ({reason}) with token {ids[-1]}, which does not end a turn (these do: "
                f"{sorted(self.end_ids)}); the server has other stop tokens"
            )
        if len(ids) < request.max_new_tokens:
            raise UnusableError(
                f"it ended (length) after {len(ids)} of {request.max_new_tokens} tokens: the server's context is too "
                f"short for a prompt of {len(request.prompt_ids)}"
            )
        return "length"


def checked_logprobs(logprobs: object, count: int) -> NDArray[np.float32]:
    """Return log-probabilities as an array [count]. Raises UnusableError where they are not `count` finite ones."""
    if not isinstance(logprobs, list) or not all(isinstance(each, int | float) for each in logprobs):
        raise UnusableError("it has no log-probabilities of its tokens")
    if len(logprobs) != count:
        raise UnusableError(f"it has {count} tokens and {len(logprobs)} log-probabilities")
    if wrong := [each for each in logprobs if not is_finite(each) or each > ROUNDING]:
        raise UnusableError(f"{shown(wrong[0])} is no log-probability")
    return np.array(logprobs, np.float32)
