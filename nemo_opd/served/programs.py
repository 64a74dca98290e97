"""Requests about the tokens of a prompt to programs that serve a model, and their answers."""

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
    """Answer of a server about a prompt of N tokens, unchecked."""

    realised: list[Any]
    """[N − 1]: log-probability of each token but the first; None if it is missing."""
    counts: list[int]
    """[N]: number of tokens that are named as likeliest after each token."""
    ids: list[Any]
    """[sum of counts]: these tokens, position by position."""
    log_p: list[Any]
    """The same length: their log-probabilities."""


class ServerProgram(ABC):
    """A program's request for the log-probabilities of a prompt, and its reply.

    One token is sampled, which is not used: its distribution is the one after the prompt's last token.
    """

    path: ClassVar[str] = "/v1/completions"
    unused_positions: ClassVar[int] = 1
    """Positions of a server's context that no prompt may reach; one is for the token that is sampled."""
    hint: ClassVar[str]
    """Option by which more log-probabilities are allowed, for errors."""

    @abstractmethod
    def body(self, ids: list[int], model: str, logprobs: int) -> _Json:
        """Return the body of a request about a prompt."""

    @abstractmethod
    def read(self, reply: _Json, ids: list[int], model: str) -> PromptLogprobs:
        """Read the reply about these ids.

        Raises UnusableError where it is about others or by another model, and KeyError, TypeError, IndexError,
        AttributeError or ValueError where it has another form.
        """


class VLLM(ServerProgram):
    """vLLM's completions with `prompt_logprobs`, which are those of the model, whatever a server samples with."""

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
        known = [each or {} for each in positions[1:]]
        last = choice["logprobs"]["top_logprobs"][0]
        if len(positions) != len(ids):
            raise UnusableError(f"it has log-probabilities of {len(positions)} tokens, and {len(ids)} were sent")
        return PromptLogprobs(
            realised=[each.get(str(token), _MISSING)["logprob"] for each, token in zip(known, ids[1:], strict=True)],
            counts=[*map(len, known), len(last)],
            ids=[*(int(token) for each in known for token in each), *map(_number, last)],
            log_p=[*(entry["logprob"] for each in known for entry in each.values()), *last.values()],
        )


class SGLang(ServerProgram):
    """SGLang by its native `/generate`."""

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
        named = [*info["input_top_logprobs"][1:], info["output_top_logprobs"][0]]
        return PromptLogprobs(
            realised=[each[0] for each in echo[1:]],
            counts=[len(each or ()) for each in named],
            ids=[entry[1] for each in named for entry in each or ()],
            log_p=[entry[0] for each in named for entry in each or ()],
        )


class OpenAI(ServerProgram):
    """OpenAI's completions with `echo`, whose tokens are written `token_id:NUMBER`: texts do not tell tokens apart."""

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
        found = _choice(reply, model).get("logprobs")
        if not found:
            raise UnusableError("it has no log-probabilities (logprobs)")
        _require_echo([_number(token) for token in found["tokens"]][: len(ids)], ids)
        named = [each or {} for each in found["top_logprobs"][1 : len(ids) + 1]]
        return PromptLogprobs(
            realised=found["token_logprobs"][1 : len(ids)],
            counts=[len(each) for each in named],
            ids=[_number(token) for each in named for token in each],
            log_p=[value for each in named for value in each.values()],
        )


PROGRAMS: dict[str, type[ServerProgram]] = {"vllm": VLLM, "sglang": SGLang, "openai": OpenAI}
"""`program` of a served teacher → its requests."""


def _choice(reply: _Json, model: str) -> _Json:
    """Return the only completion. Raises UnusableError where another model made it."""
    if reply.get("model") not in (None, model):
        raise UnusableError(f"it is by the model {shown(reply['model'])} and not by {model!r}")
    choice: _Json = reply["choices"][0]
    return choice


def _require_echo(found: Sequence[object] | None, sent: list[int]) -> None:
    """Raise UnusableError unless the ids that a reply is about are those that were sent."""
    if found is None:
        raise UnusableError("it does not say which token ids it is about (prompt_token_ids)")
    if list(found) != sent:
        differing = (i for i, pair in enumerate(zip(found, sent, strict=False)) if pair[0] != pair[1])
        place = next(differing, min(len(found), len(sent)))
        there, here = (shown(each[place]) if place < len(each) else "nothing" for each in (found, sent))
        raise UnusableError(f"it is about other token ids: {there} at position {place}, where {here} was sent")


def _number(token: str) -> int:
    """Return the id of a token that is written `token_id:NUMBER`. Raises UnusableError for another form."""
    name, _, number = token.partition(":")
    if name != "token_id":
        raise UnusableError(
            f"its tokens are texts ({shown(token)}), which do not tell ids apart, and not token_id:NUMBER"
        )
    return int(number)
