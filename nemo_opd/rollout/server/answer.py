"""What a server said to a request, and whether it can be used."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nemo_opd.data.record import FinishReason
from nemo_opd.rollout.base import Completion, Request
from nemo_opd.users_code import is_finite, shown

ROUNDING = 1e-3
"""By which a log-probability may be above 0: servers compute them in 32 bits."""


class UnusableError(Exception):
    """An answer that is none; the message says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """As the server gave it, with nothing checked."""

    ids: object
    logprobs: object
    """By the policy that sampled, after the temperature and, where the program `sees_cuts`, top-k and top-p."""
    finish_reason: str | None
    model: str | None
    """That made it; None where the program does not say."""
    raw_logprobs: object = None
    """By the model, at temperature 1; None where the program has to be asked for them."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the answers must fit."""

    model: str
    vocab_size: int
    end_ids: frozenset[int]

    def completion(self, request: Request, answer: Answer, version: int) -> Completion:
        """The answer as a completion by weights of `version`. Raises UnusableError."""
        if answer.model not in (None, self.model):
            raise UnusableError(f"it is by the model {answer.model!r} and not by {self.model!r}")
        ids = self._checked_ids(answer.ids, request.max_new_tokens)
        behaviour = checked_logprobs(answer.logprobs, len(ids))
        return Completion(
            ids=np.array(ids, np.int32),
            logprobs=behaviour if answer.raw_logprobs is None else checked_logprobs(answer.raw_logprobs, len(ids)),
            behaviour_logprobs=behaviour,
            finish_reason=self._finish_reason(ids, answer.finish_reason),
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

    def _finish_reason(self, ids: list[int], said: str | None) -> FinishReason:
        if ids[-1] in self.end_ids:
            return "stop"
        if said != "length":
            raise UnusableError(
                f"it ended ({said}) with token {ids[-1]}, which is none that ends a turn (those are "
                f"{sorted(self.end_ids)}); the server has stop tokens of its own"
            )
        return "length"


def checked_logprobs(logprobs: object, count: int) -> NDArray[np.float32]:
    """As an array [count]. Raises UnusableError where they are not `count` finite log-probabilities."""
    if not isinstance(logprobs, list) or not all(isinstance(each, int | float) for each in logprobs):
        raise UnusableError("it has no log-probabilities of its tokens")
    if len(logprobs) != count:
        raise UnusableError(f"it has {count} tokens and {len(logprobs)} log-probabilities")
    if wrong := [each for each in logprobs if not is_finite(each) or each > ROUNDING]:
        raise UnusableError(f"{shown(wrong[0])} is no log-probability")
    return np.array(logprobs, np.float32)
