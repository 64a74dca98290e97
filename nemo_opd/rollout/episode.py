"""A rollout in progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nemo_opd.data.continuation import Ids
from nemo_opd.data.record import Message, Prompt, Rollout
from nemo_opd.errors import RolloutError
from nemo_opd.rollout.base import Completion
from nemo_opd.rollout.environment import CheckedEnvironment, EnvironmentStep
from nemo_opd.rollout.renderer import Renderer

_CUT_MARK = " [cut: the response was too long]"


@dataclass(slots=True)
class Episode:
    """Tokens and messages so far."""

    prompt: Prompt
    sample: int
    environment: CheckedEnvironment | None
    messages: list[Message]
    """Messages, with the calls in the student's turns as `tool_calls`."""
    ids: list[Ids] = field(default_factory=list)
    """Parts: the prompt, then a turn, the tokens between turns, a turn, …"""
    logprobs: list[np.ndarray] = field(default_factory=list)
    """One array for each part; 0 where nothing was sampled."""
    behaviour_logprobs: list[np.ndarray] = field(default_factory=list)
    """One array for each part; 0 where nothing was sampled."""
    turns: list[tuple[int, int]] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)
    steps: list[EnvironmentStep] = field(default_factory=list)
    reward: float = 0.0
    last: Completion | None = None
    num_cut_responses: int = 0
    is_over: bool = False

    @property
    def length(self) -> int:
        return sum(map(len, self.ids))

    def all_ids(self) -> Ids:
        return np.concatenate(self.ids).astype(np.int32, copy=False)

    def extend(self, ids: Ids) -> None:
        """Add tokens that were not sampled."""
        self.ids.append(ids)
        for logprobs in (self.logprobs, self.behaviour_logprobs):
            logprobs.append(np.zeros(len(ids), np.float32))

    def add_turn(self, completion: Completion, renderer: Renderer) -> None:
        """Add sampled tokens, with the one that ended the turn."""
        start = self.length
        spoken = completion.ids[:-1] if completion.finish_reason == "stop" else completion.ids
        self.ids.append(completion.ids)
        self.logprobs.append(completion.logprobs)
        self.behaviour_logprobs.append(completion.behaviour_logprobs)
        self.turns.append((start, start + len(completion.ids)))
        self.responses.append(renderer.text(spoken))
        self.last = completion
        if not isinstance(self.prompt.content, str):
            message: Message = {"role": "assistant", "content": self.responses[-1]}
            if self.environment is not None:
                ids = self.all_ids()[: start + len(spoken)]
                if calls := renderer.tool_calls(ids, start, self.prompt.tools):
                    message["tool_calls"] = calls
            self.messages.append(message)

    def add_step(self, step: EnvironmentStep) -> None:
        self.steps.append(step)
        self.reward += float(step.reward)

    def add_answer(self, messages: Sequence[Message], ids: Ids, num_cut: int) -> None:
        """Add the environment's messages, and their tokens with the template's around them."""
        self.messages.extend(messages)
        self.extend(ids)
        self.num_cut_responses += num_cut

    def rollout(self) -> Rollout:
        assert self.last is not None, "an episode has a turn"
        ids = self.all_ids()
        mask = np.zeros(len(ids), np.bool_)
        for start, stop in self.turns:
            mask[start:stop] = True
        is_played = self.environment is not None
        return Rollout(
            prompt=self.prompt,
            sample=self.sample,
            ids=ids,
            loss_mask=mask,
            logprobs=np.concatenate(self.logprobs).astype(np.float32, copy=False),
            behaviour_logprobs=np.concatenate(self.behaviour_logprobs).astype(np.float32, copy=False),
            turns=np.array(self.turns, np.int32),
            responses=tuple(self.responses),
            messages=self._messages_as_written(),
            finish_reason=self.last.finish_reason,
            version=self.last.version,
            env_reward=self.reward if is_played else None,
            env_done=bool(self.steps[-1].done) if is_played else None,
            num_calls=sum(step.num_calls for step in self.steps),
            num_failed_calls=sum(step.num_failed_calls for step in self.steps),
            num_cut_responses=self.num_cut_responses,
        )

    def _messages_as_written(self) -> tuple[Message, ...]:
        """Return the messages, without `tool_calls` in the student's: its texts contain them."""
        opening = 0 if isinstance(self.prompt.content, str) else len(self.prompt.content)
        later = ({key: value for key, value in m.items() if key != "tool_calls"} for m in self.messages[opening:])
        return (*self.messages[:opening], *later)


def shortened_messages(messages: Sequence[Message], renderer: Renderer, max_tokens: int) -> tuple[list[Message], int]:
    """Cut messages so that their contents have `max_tokens` together at most, and return how many were cut.

    The mark of a cut is part of the contents, and is all that is left of a message without room.
    """
    left, out, num_cut = max_tokens, [], 0
    for message in messages:
        content, length = message["content"], renderer.num_tokens(message["content"])
        if length > left:
            room = max(0, left - renderer.num_tokens(_CUT_MARK))
            content, num_cut = renderer.shortened(content, room) + _CUT_MARK, num_cut + 1
        left = max(0, left - length)
        out.append({**message, "content": content})
    return out, num_cut


def require_completion(completion: Completion, episode: Episode, max_new_tokens: int) -> None:
    """Raise RolloutError for a completion that an engine must not return."""
    number, given = len(completion.ids), [len(completion.logprobs), len(completion.behaviour_logprobs)]
    if not 1 <= number <= max_new_tokens or given != [number, number]:
        raise RolloutError(
            f"the engine answered prompt {episode.prompt.index}, sample {episode.sample}, with {number} tokens and "
            f"{given[0]} raw and {given[1]} behaviour log-probabilities; requested were 1 to {max_new_tokens}"
        )
