"""Requests for prompt log-probabilities to serving programs, and their replies."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nemo_opd.rollout.base import Sampling
from nemo_opd.rollout.server.http import UnusableError
from nemo_opd.rollout.server.sglang import UNUSED_POSITIONS, echoed_ids
from nemo_opd.rollout.server.vllm import sampled_with
from nemo_opd.users_code import shown

_Json = dict[str, Any]
_MISSING: _Json = {"logprob": None}


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


class VLLM(ServerProgram):
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


class SGLang(ServerProgram):
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


class OpenAI(ServerProgram):
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


PROGRAMS: dict[str, type[ServerProgram]] = {"vllm": VLLM, "sglang": SGLang, "openai": OpenAI}
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
