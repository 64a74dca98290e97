"""One rollout while it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nemo_opd.data.continuation import Ids
from nemo_opd.data.record import EnvironmentStep, Message, Prompt, Rollout
from nemo_opd.errors import RolloutError
from nemo_opd.rollout.base import Completion
from nemo_opd.rollout.environment import Played
from nemo_opd.rollout.prompts import Renderer

CUT_MARK = " [cut: the response was too long]"


@dataclass(slots=True)
class Episode:
    """The tokens so far, and who said what."""

    prompt: Prompt
    sample: int
    environment: Played | None
    messages: list[Message]
    """With the calls found in the student's turns as `tool_calls`."""
    ids: list[Ids] = field(default_factory=list)
    """Parts: the prompt, then a turn, what is between, a turn, …"""
    logprobs: list[np.ndarray] = field(default_factory=list)
    """One a part; 0 where nothing was sampled."""
    behaviour_logprobs: list[np.ndarray] = field(default_factory=list)
    """Likewise."""
    turns: list[tuple[int, int]] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)
    last: Completion | None = None
    reward: float = 0.0
    num_calls: int = 0
    num_failed_calls: int = 0
    num_cut_responses: int = 0
    is_over: bool = False
    is_done: bool = False
    """The environment ended it."""

    @property
    def length(self) -> int:
        return sum(map(len, self.ids))

    def all_ids(self) -> Ids:
        return np.concatenate(self.ids).astype(np.int32, copy=False)

    def extend(self, ids: Ids) -> None:
        """Tokens that were not sampled."""
        self.ids.append(ids)
        for logprobs in (self.logprobs, self.behaviour_logprobs):
            logprobs.append(np.zeros(len(ids), np.float32))

    def add_turn(self, completion: Completion, renderer: Renderer) -> None:
        """Tokens that were sampled, with the one that ended the turn."""
        start = self.length
        said = completion.ids[:-1] if completion.finish_reason == "stop" else completion.ids
        self.ids.append(completion.ids)
        self.logprobs.append(completion.logprobs)
        self.behaviour_logprobs.append(completion.behaviour_logprobs)
        self.turns.append((start, start + len(completion.ids)))
        self.responses.append(renderer.text(said))
        self.last = completion
        if not isinstance(self.prompt.content, str):
            message: Message = {"role": "assistant", "content": self.responses[-1]}
            if self.environment is not None and (calls := self._calls(len(said), renderer)):
                message["tool_calls"] = calls
            self.messages.append(message)

    def _calls(self, num_said: int, renderer: Renderer) -> list[Message]:
        start = self.turns[-1][0]
        return renderer.tool_calls(self.all_ids()[: start + num_said], start, self.prompt.tools)

    def add_step(self, step: EnvironmentStep) -> None:
        self.reward += float(step.reward)
        self.num_calls += step.num_calls
        self.num_failed_calls += step.num_failed_calls
        self.is_done = bool(step.done)

    def answer(self, messages: Sequence[Message], ids: Ids, num_cut: int) -> None:
        """What the environment said, and its tokens with the template's around them."""
        self.messages.extend(messages)
        self.extend(ids)
        self.num_cut_responses += num_cut

    def rollout(self) -> Rollout:
        assert self.last is not None, "an episode has a turn"
        ids = self.all_ids()
        turns = np.array(self.turns, np.int32)
        mask = np.zeros(len(ids), np.bool_)
        for start, stop in self.turns:
            mask[start:stop] = True
        return Rollout(
            prompt=self.prompt,
            sample=self.sample,
            ids=ids,
            loss_mask=mask,
            logprobs=np.concatenate(self.logprobs).astype(np.float32, copy=False),
            behaviour_logprobs=np.concatenate(self.behaviour_logprobs).astype(np.float32, copy=False),
            turns=turns,
            responses=tuple(self.responses),
            messages=self._messages_as_written(),
            finish_reason=self.last.finish_reason,
            version=self.last.version,
            env_reward=None if self.environment is None else self.reward,
            env_done=None if self.environment is None else self.is_done,
            num_calls=self.num_calls,
            num_failed_calls=self.num_failed_calls,
            num_cut_responses=self.num_cut_responses,
        )

    def _messages_as_written(self) -> tuple[Message, ...]:
        opening = 0 if isinstance(self.prompt.content, str) else len(self.prompt.content)
        said = ({key: value for key, value in m.items() if key != "tool_calls"} for m in self.messages[opening:])
        return (*self.messages[:opening], *said)


def shortened_messages(messages: Sequence[Message], renderer: Renderer, max_tokens: int) -> tuple[list[Message], int]:
    """Messages whose contents have `max_tokens` together at most, the mark of a cut among them, and how many were cut.

    Of a message for which nothing is left, the mark stays.
    """
    left, out, num_cut = max_tokens, [], 0
    for message in messages:
        content, length = message["content"], renderer.num_tokens(message["content"])
        if length > left:
            room = max(0, left - renderer.num_tokens(CUT_MARK))
            content, num_cut = renderer.shortened(content, room) + CUT_MARK, num_cut + 1
        left = max(0, left - length)
        out.append({**message, "content": content})
    return out, num_cut


def require_completion(completion: Completion, episode: Episode, max_new_tokens: int) -> None:
    """Raises RolloutError for what no engine may answer."""
    number, given = len(completion.ids), [len(completion.logprobs), len(completion.behaviour_logprobs)]
    if not 1 <= number <= max_new_tokens or given != [number, number]:
        raise RolloutError(
            f"the engine answered prompt {episode.prompt.index}, sample {episode.sample}, with {number} tokens and "
            f"{given[0]} raw and {given[1]} behaviour log-probabilities; asked for were 1 to {max_new_tokens}"
        )
