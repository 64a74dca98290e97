"""Requests for prompt log-probabilities to serving programs, and checked rows from their replies (methods.md §13.3)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_opd.logits.rows import SparseLayout, SparseRows
from nemo_opd.rollout.engine_interface import Sampling
from nemo_opd.rollout.server.client import ROUNDING, UnusableError
from nemo_opd.rollout.server.sglang import UNUSED_POSITIONS, echoed_ids
from nemo_opd.rollout.server.vllm import sampled_with
from nemo_opd.users_code import shown

_Json = dict[str, Any]
_Floats = NDArray[np.float64]
_MISSING: _Json = {"logprob": None}
_LEAST = -9999.0
"""Log-probability that servers write for −inf, which JSON lacks."""
_NOISE = 2.0**-20
"""Rounding error of a sum of 32-bit probabilities. A smaller remainder cannot be computed from the sum."""
_EXCESS = 0.01
"""Largest excess of a probability sum over 1 that counts as rounding."""
_UNANSWERED = 0.01
"""Largest share of unanswered positions that is accepted without a retry; one position is always accepted."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A server's answer about a prompt of N tokens, unchecked."""

    realised: list[Any]
    """[N − 1]: log-probability of each token but the first; None if it is missing."""
    counts: list[int]
    """[N]: number of likeliest next tokens listed per position."""
    ids: list[Any]
    """[sum of counts]: ids of the likeliest tokens, position by position."""
    log_p: list[Any]
    """[sum of counts]: their log-probabilities."""


class ServerProgram(ABC):
    """A program's request for the log-probabilities of a prompt, and its reply.

    Programs that sample are `rollout.server.server_process.Program`.
    The request samples one token and ignores it, to get the distribution after the prompt's last token.
    """

    path: ClassVar[str] = "/v1/completions"
    unused_positions: ClassVar[int] = 1
    """Positions of a server's context that a prompt cannot use; one is for the sampled token."""
    hint: ClassVar[str]
    """Option that allows more log-probabilities, for error messages."""

    @abstractmethod
    def body(self, ids: list[int], model: str, logprobs: int) -> _Json:
        """Return the body of a request for the log-probabilities of prompt `ids`."""

    @abstractmethod
    def read(self, reply: _Json, ids: list[int], model: str) -> PromptLogprobs:
        """Read the reply to a request about `ids`.

        Raises UnusableError if it is about other ids or by another model, and KeyError, TypeError, IndexError,
        AttributeError or ValueError if it has another form.
        """


class _VLLM(ServerProgram):
    """vLLM's completions with `prompt_logprobs`, which are the model's, whatever the sampling options are."""

    hint = "--max-logprobs"

    def body(self, ids: list[int], model: str, logprobs: int) -> _Json:
        return {
            "model": model,
            "prompt": ids,
            "max_tokens": 1,
            **sampled_with(Sampling()),
            "prompt_logprobs": logprobs,
            "logprobs": logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "ignore_eos": True,
        }

    def read(self, reply: _Json, ids: list[int], model: str) -> PromptLogprobs:
        choice = _choice(reply, model)
        _require_echo(choice.get("prompt_token_ids"), ids)
        positions = choice.get("prompt_logprobs")
        if not positions:
            raise UnusableError("it has no log-probabilities of the prompt (prompt_logprobs)")
        prompt = [position or {} for position in positions[1:]]
        last = choice["logprobs"]["top_logprobs"][0]
        if len(positions) != len(ids):
            raise UnusableError(f"it has log-probabilities of {len(positions)} tokens, and {len(ids)} were sent")
        return PromptLogprobs(
            realised=[
                position.get(str(token), _MISSING)["logprob"] for position, token in zip(prompt, ids[1:], strict=True)
            ],
            counts=[*map(len, prompt), len(last)],
            ids=[*(int(token) for position in prompt for token in position), *map(_token_id, last)],
            log_p=[*(entry["logprob"] for position in prompt for entry in position.values()), *last.values()],
        )


class _SGLang(ServerProgram):
    """SGLang with its native `/generate`."""

    path = "/generate"
    unused_positions = UNUSED_POSITIONS + 1
    hint = "a newer SGLang"

    def body(self, ids: list[int], model: str, logprobs: int) -> _Json:
        return {
            "input_ids": ids,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": logprobs,
            "sampling_params": {
                "max_new_tokens": 1,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "ignore_eos": True,
            },
        }

    def read(self, reply: _Json, ids: list[int], model: str) -> PromptLogprobs:
        info = reply["meta_info"]
        # Lists of (log-probability, id, text or None); the first token has no log-probability.
        echo = info.get("input_token_logprobs")
        if not echo:
            raise UnusableError("it has no log-probabilities of the prompt (input_token_logprobs)")
        _require_echo(echoed_ids(echo, ids), ids)
        positions = [entries or () for entries in (*info["input_top_logprobs"][1:], info["output_top_logprobs"][0])]
        return PromptLogprobs(
            realised=[entry[0] for entry in echo[1:]],
            counts=[*map(len, positions)],
            ids=[entry[1] for entries in positions for entry in entries],
            log_p=[entry[0] for entries in positions for entry in entries],
        )


class _OpenAI(ServerProgram):
    """OpenAI's completions with `echo`. Tokens are written as `token_id:NUMBER`, since texts can be ambiguous."""

    hint = "an endpoint that allows more"

    def body(self, ids: list[int], model: str, logprobs: int) -> _Json:
        return {
            "model": model,
            "prompt": ids,
            "max_tokens": 1,
            "echo": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "logprobs": logprobs,
            "return_tokens_as_token_ids": True,
        }

    def read(self, reply: _Json, ids: list[int], model: str) -> PromptLogprobs:
        logprobs = _choice(reply, model).get("logprobs")
        if not logprobs:
            raise UnusableError("it has no log-probabilities (logprobs)")
        _require_echo([_token_id(token) for token in logprobs["tokens"]][: len(ids)], ids)
        positions = [position or {} for position in logprobs["top_logprobs"][1 : len(ids) + 1]]
        return PromptLogprobs(
            realised=logprobs["token_logprobs"][1 : len(ids)],
            counts=[*map(len, positions)],
            ids=[_token_id(token) for position in positions for token in position],
            log_p=[value for position in positions for value in position.values()],
        )


PROGRAMS: dict[str, type[ServerProgram]] = {"vllm": _VLLM, "sglang": _SGLang, "openai": _OpenAI}
"""A served teacher's `program` → its requests."""


def _choice(reply: _Json, model: str) -> _Json:
    """Return the only completion. Raises UnusableError if it is by another model."""
    if reply.get("model") not in (None, model):
        raise UnusableError(f"it is by the model {shown(reply['model'])} and not by {model!r}")
    choice: _Json = reply["choices"][0]
    return choice


def _require_echo(echo: Sequence[object] | None, sent: list[int]) -> None:
    """Raise UnusableError unless the reply is about the ids that were sent."""
    if echo is None:
        raise UnusableError("it does not say which token ids it is about (prompt_token_ids)")
    if list(echo) != sent:
        differing = (i for i, pair in enumerate(zip(echo, sent, strict=False)) if pair[0] != pair[1])
        position = next(differing, min(len(echo), len(sent)))
        theirs, ours = (shown(ids[position]) if position < len(ids) else "nothing" for ids in (echo, sent))
        raise UnusableError(f"it is about other token ids: {theirs} at position {position}, where {ours} was sent")


def _token_id(token: str) -> int:
    """Parse a token written as `token_id:NUMBER`. Raises UnusableError for another form."""
    name, _, number = token.partition(":")
    if name != "token_id":
        raise UnusableError(
            f"its tokens are texts ({shown(token)}) and not token_id:NUMBER, so that their ids are ambiguous"
        )
    return int(number)


def encoded_rows(answer: PromptLogprobs, ids: NDArray[np.integer[Any]], layout: SparseLayout) -> NDArray[np.uint8]:
    """Encode a server's answer about ids [N]: uint8 [N, row_bytes].

    Head rows without a token (padding) count as remaining mass. The entropy is unknown and therefore NaN. A position
    with a missing or NaN log-probability, or with too few likeliest tokens, is unanswered: the log-probability of its
    next token is NaN. Raises UnusableError for too many unanswered positions, for invalid log-probabilities, and for
    ids outside the vocabulary if all tokens are requested.
    """
    realised, log_p = _checked(answer.realised), _checked(answer.log_p)
    if len(realised) != len(ids) - 1:
        raise UnusableError(f"it has log-probabilities of {len(realised)} of {len(ids) - 1} tokens")
    counts = np.asarray(answer.counts, np.int64)
    if len(counts) != len(ids):
        raise UnusableError(f"it has likeliest tokens of {len(counts)} positions, and {len(ids)} were sent")
    positions = np.repeat(np.arange(len(ids)), counts)
    log_p_next = np.append(realised, 0.0)
    is_answered = (counts >= layout.top_k) & ~np.isnan(log_p_next)
    is_answered[positions[np.isnan(log_p)]] = False
    _require_answers(is_answered, counts, layout.top_k)
    is_used = is_answered[positions]
    top_ids, top = _likeliest(positions[is_used], _ids(answer.ids)[is_used], log_p[is_used], layout.top_k)
    next_ids = np.append(np.asarray(ids[1:], np.int64), -1)[is_answered]
    is_apart = (next_ids >= 0) & ~(top_ids == next_ids[:, None]).any(1)
    is_token = top_ids < layout.vocab_size
    if layout.top_k == layout.vocab_size and not is_token.all():
        raise UnusableError(
            f"id {top_ids[~is_token][0]} is not in the vocabulary, but is one of the {layout.top_k} likeliest ids, "
            "which should be all tokens"
        )
    num_remaining = layout.vocab_size - is_token.sum(1) - is_apart
    apart = np.where(is_apart, log_p_next[is_answered], -np.inf)
    log_rest = _log_rest(top, is_token, apart, num_remaining, np.flatnonzero(is_answered))
    # Tokens before other ids, in their order.
    order = np.argsort(~is_token, axis=1, kind="stable")
    no_token = 256**layout.id_bytes - 1
    rows = SparseRows(
        torch.full((len(ids), layout.top_k), no_token),
        torch.full((len(ids), layout.top_k), -torch.inf),
        torch.from_numpy(np.where(is_answered, log_p_next, np.nan)).float(),
        torch.zeros(len(ids)),
        torch.full((len(ids),), torch.nan),
    )
    mask = torch.from_numpy(is_answered)
    rows.ids[mask] = torch.from_numpy(np.take_along_axis(np.where(is_token, top_ids, no_token), order, 1))
    rows.log_p[mask] = torch.from_numpy(np.take_along_axis(np.where(is_token, top, -np.inf), order, 1)).float()
    rows.log_rest[mask] = torch.from_numpy(log_rest).float()
    return layout.pack(rows).numpy()


def _require_answers(is_answered: NDArray[np.bool_], counts: NDArray[np.int64], top_k: int) -> None:
    """Raise UnusableError if too many positions are unanswered, or all positions with a next token."""
    unanswered = np.flatnonzero(~is_answered)
    is_enough = len(unanswered) <= max(1, _UNANSWERED * len(is_answered)) and is_answered[:-1].any()
    if is_enough or not len(unanswered):
        return
    first = unanswered[0]
    if counts[first] < top_k:
        raise UnusableError(f"it has {counts[first]} likeliest tokens of position {first}, and {top_k} were requested")
    raise UnusableError(
        f"the log-probability is missing or NaN at {len(unanswered)} of {len(is_answered)} positions, first at "
        f"position {first}"
    )


def _likeliest(
    positions: NDArray[np.int64], ids: NDArray[np.int64], log_p: _Floats, top_k: int
) -> tuple[NDArray[np.int64], _Floats]:
    """Return the k likeliest ids of each position and their log-probabilities, [N, k], likeliest first.

    positions: position of each id, ascending. Each of the N positions has at least k ids.
    """
    order = np.lexsort((ids, -log_p, positions))
    # Some programs also list the observed token, so that a position may have k + 1 ids.
    begins = np.searchsorted(positions, positions)
    top_indices = order[np.arange(len(positions)) - begins < top_k]
    top_ids, top = ids[top_indices].reshape(-1, top_k), log_p[top_indices].reshape(-1, top_k)
    if top_k > 1 and (np.diff(np.sort(top_ids, 1), axis=1) == 0).any():
        raise UnusableError("it lists a token twice at one position")
    return top_ids, top


def _log_rest(
    top: _Floats,
    is_token: NDArray[np.bool_],
    apart: _Floats,
    num_remaining: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> _Floats:
    """Return the log of the mass ρ outside the likeliest tokens and the observed token (methods.md (13.3)).

    top, is_token: [N, k]. apart: [N], log-probability of an observed token that is not among the likeliest, else −inf.
    num_remaining: [N], number of remaining tokens in the vocabulary. positions: [N], for messages.
    """
    p = np.exp(top)
    mass = (p * is_token).sum(1) + np.exp(apart)
    if mass.max() > 1 + _EXCESS:
        raise UnusableError(
            f"its probabilities at position {positions[mass.argmax()]} sum to {mass.max():.3f}, which is above 1"
        )
    bound = num_remaining * p[:, -1] + (p * ~is_token).sum(1)
    with np.errstate(divide="ignore"):
        return np.log(np.minimum(np.maximum(1 - mass, _NOISE), bound))


def _checked(log_p: Sequence[Any]) -> _Floats:
    """Return log-probabilities as an array, NaN for None. Raises UnusableError if one is neither."""
    try:
        numbers = np.asarray(log_p, np.float64).reshape(len(log_p))
    except (TypeError, ValueError, OverflowError) as error:
        wrong = next((value for value in log_p if not isinstance(value, int | float | None)), log_p[0])
        raise UnusableError(f"{shown(wrong)} is not a log-probability") from error
    if len(too_large := numbers[numbers > ROUNDING]):
        raise UnusableError(f"{shown(float(too_large[0]))} is not a log-probability")
    return np.where(numbers <= _LEAST, -np.inf, np.minimum(numbers, 0.0))


def _ids(ids: Sequence[Any]) -> NDArray[np.int64]:
    try:
        array = np.asarray(ids, np.int64).reshape(len(ids))
    except (TypeError, ValueError, OverflowError) as error:
        raise UnusableError("its token ids are not integers") from error
    if len(array) and array.min() < 0:
        raise UnusableError(f"{array.min()} is not a token id")
    return array
