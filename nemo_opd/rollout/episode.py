"""A rollout in progress: its tokens, its turns, and the messages of its environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_opd.data.row_types import FinishReason, Message, Prompt, Rollout
from nemo_opd.data.text import Ids
from nemo_opd.errors import RolloutError
from nemo_opd.rollout.engine_interface import Completion
from nemo_opd.rollout.environment import CheckedEnvironment, EnvironmentStep
from nemo_opd.rollout.renderer import Renderer

_CUT_MARK = " [cut: the response was too long]"


class Episode:
    """Tokens and messages of a rollout so far."""

    def __init__(self, prompt: Prompt, sample: int, environment: CheckedEnvironment | None) -> None:
        self.prompt, self.sample, self.environment = prompt, sample, environment
        self._opening: list[Message] = [] if isinstance(prompt.content, str) else list(prompt.content)
        self.messages = list(self._opening)
        """Messages; the student's turns also have their calls as `tool_calls`."""
        self.parts: list[_Part] = []
        self.num_cut_responses = 0
        self.is_over = False
        self.finish_reason: FinishReason = "stop"
        self._version = 0
        self._turns: list[tuple[int, int]] = []
        self._responses: list[str] = []
        self._steps: list[EnvironmentStep] = []
        self._reward = 0.0

    @property
    def length(self) -> int:
        return sum(len(part.ids) for part in self.parts)

    @property
    def ids(self) -> Ids:
        return np.concatenate([part.ids for part in self.parts]).astype(np.int32, copy=False)

    def add_unsampled(self, ids: Ids) -> None:
        """Append tokens of the prompt or of the environment's messages."""
        zeros = np.zeros(len(ids), np.float32)
        self.parts.append(_Part(ids, np.zeros(len(ids), np.bool_), zeros, zeros))

    def add_turn(self, completion: Completion, renderer: Renderer, stops: Sequence[str]) -> None:
        """Append a sampled turn with its end token. stops: stop texts; the response ends before the first one."""
        start, ids = self.length, completion.ids
        self.parts.append(_Part(ids, np.ones(len(ids), np.bool_), completion.logprobs, completion.behaviour_logprobs))
        self.finish_reason, self._version = completion.finish_reason, completion.version
        self._turns.append((start, start + len(ids)))
        content_ids = ids[:-1] if completion.finish_reason == "stop" else ids
        self._responses.append(_response(completion, renderer, stops))
        if not isinstance(self.prompt.content, str):
            message: Message = {"role": "assistant", "content": self._responses[-1]}
            if self.environment is not None:
                before_end = self.ids[: start + len(content_ids)]
                if calls := renderer.tool_calls(before_end, start, self.prompt.tools):
                    message["tool_calls"] = calls
            self.messages.append(message)

    def add_step(self, step: EnvironmentStep) -> None:
        self._steps.append(step)
        self._reward += float(step.reward)

    def rollout(self) -> Rollout:
        ids, is_sampled, logprobs, behaviour_logprobs = map(np.concatenate, zip(*self.parts, strict=True))
        has_environment = self.environment is not None
        return Rollout(
            prompt=self.prompt,
            sample=self.sample,
            ids=ids.astype(np.int32, copy=False),
            loss_mask=is_sampled,
            logprobs=logprobs.astype(np.float32, copy=False),
            behaviour_logprobs=behaviour_logprobs.astype(np.float32, copy=False),
            turns=np.array(self._turns, np.int32),
            responses=tuple(self._responses),
            messages=self._messages_as_written(),
            finish_reason=self.finish_reason,
            version=self._version,
            env_reward=self._reward if has_environment else None,
            env_done=bool(self._steps[-1].done) if has_environment else None,
            num_calls=sum(step.num_calls for step in self._steps),
            num_failed_calls=sum(step.num_failed_calls for step in self._steps),
            num_cut_responses=self.num_cut_responses,
        )

    def _messages_as_written(self) -> tuple[Message, ...]:
        """Return the messages without the `tool_calls` of the student's turns, whose text contains the calls."""
        added = self.messages[len(self._opening) :]
        return (*self._opening, *({key: m[key] for key in m if key != "tool_calls"} for m in added))


class _Part(NamedTuple):
    """Consecutive tokens of a rollout: the prompt, a turn, or the tokens between turns. Arrays have equal lengths."""

    ids: Ids
    is_sampled: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    """0 for tokens that were not sampled."""
    behaviour_logprobs: NDArray[np.float32]
    """0 for tokens that were not sampled."""


def _response(completion: Completion, renderer: Renderer, stops: Sequence[str]) -> str:
    """Return the text before the first stop text or, without one, before the turn's end token."""
    text = renderer.text(completion.ids)
    response = text_before(text, stops)
    if response != text or completion.finish_reason == "length":
        return response
    return renderer.text(completion.ids[:-1])


def text_before(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop text."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def require_completion(completion: Completion, episode: Episode, max_new_tokens: int) -> None:
    """Raise RolloutError for a completion with a wrong number of tokens or log-probabilities."""
    num_tokens, num_raw, num_behaviour = map(len, (completion.ids, completion.logprobs, completion.behaviour_logprobs))
    if not 1 <= num_tokens <= max_new_tokens or not num_tokens == num_raw == num_behaviour:
        raise RolloutError(
            f"the engine answered prompt {episode.prompt.index}, sample {episode.sample}, with {num_tokens} tokens, "
            f"{num_raw} raw and {num_behaviour} behaviour log-probabilities; expected 1 to {max_new_tokens} tokens and "
            "one log-probability of each kind per token"
        )


def shortened_messages(messages: Sequence[Message], renderer: Renderer, max_tokens: int) -> tuple[list[Message], int]:
    """Truncate messages to `max_tokens` of content in total, and return them with the number of truncated ones.

    A truncated content ends with a mark, which counts as content. A message without room becomes the mark alone.
    """
    budget, shortened, num_cut = max_tokens, [], 0
    for message in messages:
        content, length = message["content"], renderer.num_tokens(message["content"])
        if length > budget:
            room = max(0, budget - renderer.num_tokens(_CUT_MARK))
            content, num_cut = renderer.shortened(content, room) + _CUT_MARK, num_cut + 1
        budget = max(0, budget - length)
        shortened.append({**message, "content": content})
    return shortened, num_cut
