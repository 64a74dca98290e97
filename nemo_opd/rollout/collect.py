"""Collection of rollouts from prompts."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from nemo_opd.data.record import Prompt, Rollout
from nemo_opd.errors import DataError, RolloutError
from nemo_opd.rollout.base import Generator, Request, Sampling
from nemo_opd.rollout.environment import CheckedEnvironment, EnvironmentFactory, EnvironmentStep
from nemo_opd.rollout.episode import Episode, require_completion, shortened_messages
from nemo_opd.rollout.renderer import Renderer

_log = logging.getLogger(__name__)
_WORD = 2**32


class Collector:
    """A loop over turns: the engine samples all rollouts at once, then their environments answer."""

    def __init__(
        self,
        engine: Generator,
        renderer: Renderer,
        *,
        sampling: Sampling,
        max_new_tokens: int,
        max_length: int,
        environment: EnvironmentFactory | None = None,
        seed: int = 0,
        stop: tuple[str, ...] = (),
    ) -> None:
        """max_new_tokens: limit per turn. max_length: limit of a whole sequence. stop: texts that end a response.

        Raises RolloutError for an environment without a conversation renderer.
        """
        if environment is not None and not renderer.takes_turns:
            raise RolloutError("an environment answers in conversations, not in texts; set data.messages_key")
        self._engine, self._renderer, self._sampling = engine, renderer, sampling
        self._max_new_tokens, self._max_length = max_new_tokens, max_length
        self._environment, self._seed = environment, seed
        self._max_turns = 1 if environment is None else environment.settings.max_turns
        self._stop, self._has_checked_tools = stop, False

    def collect(self, prompts: Sequence[Prompt], n: int, step: int) -> list[Rollout]:
        """Return n rollouts per prompt, grouped by prompt, in order.

        Randomness depends only on the run's seed, the step, the prompt's row, the sample and the turn.

        Raises RolloutError from engine and environment, DataError for a prompt that leaves no room for a response.
        """
        episodes = list(self._open_episodes(prompts, n))
        for turn in range(self._max_turns):
            active = [episode for episode in episodes if not episode.is_over]
            if not active:
                break
            self._sample(active, step, turn)
            for episode in active:
                self._answer(episode, is_last=turn + 1 == self._max_turns)
        return [episode.rollout() for episode in episodes]

    def _open_episodes(self, prompts: Sequence[Prompt], n: int) -> Iterator[Episode]:
        for row in prompts:
            previous: Episode | None = None
            for sample in range(n):
                environment = None if self._environment is None else self._environment(row.index)
                prompt = row if environment is None else _add_opening(row, environment)
                self._warn_of_hidden_tools(prompt)
                # Render only once if the environment opens all samples with the same messages.
                is_same = previous is not None and previous.prompt == prompt
                ids = previous.parts[0].ids if previous is not None and is_same else self._renderer.prompt_ids(prompt)
                self._require_room(prompt, len(ids))
                previous = Episode(prompt, sample, environment)
                previous.add_unsampled(ids)
                yield previous

    def _warn_of_hidden_tools(self, prompt: Prompt) -> None:
        if not self._has_checked_tools and prompt.tools and not self._renderer.shows_tools(prompt.tools):
            _log.warning(
                "the model's chat template does not show tools, so the model only calls them if the prompt describes "
                "them; set its chat_template to one that shows tools"
            )
        self._has_checked_tools = True

    def _require_room(self, prompt: Prompt, length: int) -> None:
        if length >= self._max_length:
            raise DataError(
                f"prompt {prompt.index} (row, counted from 0) has {length} tokens, including the environment's "
                f"messages, and leaves no room for a response in {self._max_length}; lower rollout.max_prompt_length, "
                "or raise train.max_length"
            )

    def _sample(self, active: Sequence[Episode], step: int, turn: int) -> None:
        requests = [self._request(episode, step, turn) for episode in active]
        completions = self._engine.generate(requests, self._sampling)
        if len(completions) != len(requests):
            raise RolloutError(f"the engine answered {len(requests)} requests with {len(completions)} completions")
        for episode, request, completion in zip(active, requests, completions, strict=True):
            require_completion(completion, episode, request.max_new_tokens)
            episode.add_turn(completion, self._renderer, self._stop)

    def _request(self, episode: Episode, step: int, turn: int) -> Request:
        room = self._max_length - episode.length
        seed = turn_seed(self._seed, step, episode.prompt.index, episode.sample, turn)
        return Request(episode.ids, min(self._max_new_tokens, room), seed, self._stop)

    def _answer(self, episode: Episode, *, is_last: bool) -> None:
        """End the episode, or prepare its next turn."""
        episode.is_over = True
        if episode.environment is None:
            return
        answer = episode.environment.step(tuple(episode.messages))
        episode.add_step(answer)
        if not (answer.done or is_last or episode.finish_reason == "length"):
            episode.is_over = not self._add_answer(episode, answer)

    def _add_answer(self, episode: Episode, answer: EnvironmentStep) -> bool:
        """Append the environment's messages; do nothing and return False if they leave no room for another turn."""
        assert self._environment is not None
        limit = self._environment.settings.max_response_tokens
        messages, num_cut = shortened_messages(answer.messages, self._renderer, limit)
        ids = self._renderer.between(episode.messages, messages, episode.prompt.tools)
        if episode.length + len(ids) >= self._max_length:
            return False
        episode.messages.extend(messages)
        episode.add_unsampled(ids)
        episode.num_cut_responses += num_cut
        return True


def _add_opening(prompt: Prompt, environment: CheckedEnvironment) -> Prompt:
    """Return the prompt with its environment's opening messages and tools."""
    assert not isinstance(prompt.content, str)
    messages, tools = environment.reset(prompt)
    system = [message for message in messages if message["role"] == "system"]
    non_system = [message for message in messages if message["role"] != "system"]
    tools = [*(prompt.tools or ()), *tools]
    return replace(prompt, content=[*system, *prompt.content, *non_system], tools=tools or None)


def turn_seed(seed: int, step: int, prompt: int, sample: int, turn: int) -> int:
    """Derive a seed in [0, 2^63), independent of batch, rank and order.

    seed: the run's. prompt: row. All arguments are ≥ 0 and, except `seed`, < 2^32.
    """
    # Always six words: SeedSequence does not distinguish [1] from [1, 0].
    words = [seed % _WORD, seed // _WORD, step, prompt, sample, turn]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 1


def chosen_share(prompts: Sequence[object], share: float, seed: int, step: int) -> list[bool]:
    """Select a random share of a batch's prompts, as a mask. The share is exact on average over steps."""
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed % _WORD, seed // _WORD, step])))
    number = math.floor(share * len(prompts) + random.random())
    mask = np.zeros(len(prompts), np.bool_)
    mask[random.permutation(len(prompts))[:number]] = True
    return mask.tolist()
