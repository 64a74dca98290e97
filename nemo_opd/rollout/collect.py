"""Collection of rollouts from prompts, their metrics, and rollouts.jsonl."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_opd.config.run_fields import RolloutFiles
from nemo_opd.data.row_types import Prompt, Rollout
from nemo_opd.errors import DataError, RolloutError
from nemo_opd.files import open_unlinked, storage_errors, write_atomically
from nemo_opd.logging.loggers import parse_lines
from nemo_opd.progress import tracked
from nemo_opd.rollout.engine_interface import Generator, Request, Sampling
from nemo_opd.rollout.environment import CheckedEnvironment, EnvironmentFactory, EnvironmentStep
from nemo_opd.rollout.episode import Episode, require_completion, shortened_messages
from nemo_opd.rollout.renderer import Renderer
from nemo_opd.types import Max, Mean, Metric, Sum

_log = logging.getLogger(__name__)
_SEED_WORD = 2**32
_NGRAM = 4
_DIGITS = 6


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
    words = [seed % _SEED_WORD, seed // _SEED_WORD, step, prompt, sample, turn]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 1


def chosen_share(prompts: Sequence[object], share: float, seed: int, step: int) -> list[bool]:
    """Select a random share of a batch's prompts, as a mask. The share is exact on average over steps."""
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed % _SEED_WORD, seed // _SEED_WORD, step])))
    number = math.floor(share * len(prompts) + random.random())
    mask = np.zeros(len(prompts), np.bool_)
    mask[random.permutation(len(prompts))[:number]] = True
    return mask.tolist()


def drop_long(
    prompts: Sequence[Prompt], renderer: Renderer, max_tokens: int | None, *, key: str, way_out: str
) -> tuple[Prompt, ...]:
    """Drop prompts of more than `max_tokens` tokens (None for no limit), and keep the order.

    key: setting that the prompts come from. way_out: advice for the error. Raises DataError if no prompt is left.
    """
    if max_tokens is None:
        return tuple(prompts)
    counted = tracked(prompts, f"tokenizing the prompts of {key}", "prompts")
    lengths = [len(renderer.prompt_ids(prompt)) for prompt in counted]
    short = tuple(prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= max_tokens)
    if not short:
        shortest = f"; the shortest has {min(lengths)}" if lengths else ""
        raise DataError(f"{key}: none of {len(prompts)} prompts has {max_tokens} tokens or less{shortest}; {way_out}")
    return short


def dataset_rollout(prompt: Prompt, renderer: Renderer, max_length: int) -> Rollout:
    """Return the prompt with the dataset's response, cut to `max_length`, as a rollout of version −1.

    Raises DataError if the row has no response, or the template or the model rejects it.
    """
    continued = renderer.continued(prompt)
    ids = continued.ids[:max_length]
    stop = len(ids)
    is_ended = continued.is_ended and stop == len(continued.ids)
    response = renderer.text(ids[continued.start : stop - is_ended])
    message = {"role": "assistant", "content": response}
    return Rollout(
        prompt=prompt,
        sample=0,
        ids=ids,
        loss_mask=np.arange(stop) >= continued.start,
        logprobs=np.zeros(stop, np.float32),
        behaviour_logprobs=np.zeros(stop, np.float32),
        turns=np.array([[min(continued.start, stop), stop]], np.int32),
        responses=(response,),
        messages=() if isinstance(prompt.content, str) else (*prompt.content, message),
        finish_reason="stop" if is_ended else "length",
        version=-1,
        before=continued.before,
    )


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, Metric]:
    """Return response lengths and shares of rollouts; with environments also turns and tool calls."""
    count = len(rollouts)
    lengths = [rollout.num_sampled for rollout in rollouts]
    ended = sum(rollout.finish_reason == "stop" for rollout in rollouts)
    shares = [share for share in map(repetition, rollouts) if share is not None]
    metrics: dict[str, Metric] = {
        "rollout/response_length": Mean(sum(lengths), count),
        "rollout/response_length_max": Max(max(lengths, default=0)),
        "rollout/truncation_rate": Mean(count - ended, count),
        "rollout/eos_rate": Mean(ended, count),
        "rollout/repetition": Mean(sum(shares), len(shares)),
    }
    answered = [rollout for rollout in rollouts if rollout.env_reward is not None]
    return metrics | (_turn_metrics(answered) if answered else {})


def _turn_metrics(rollouts: Sequence[Rollout]) -> dict[str, Metric]:
    """Return metrics of rollouts with an environment: turns and tool calls per rollout, share of failed calls, number
    of truncated messages, and share of rollouts that the environment did not end.
    """
    count = len(rollouts)
    calls = sum(rollout.num_calls for rollout in rollouts)
    return {
        "rollout/turns": Mean(sum(len(rollout.turns) for rollout in rollouts), count),
        "rollout/tool_calls": Mean(calls, count),
        "rollout/failed_calls": Mean(sum(rollout.num_failed_calls for rollout in rollouts), calls),
        "rollout/cut_tool_responses": Sum(sum(rollout.num_cut_responses for rollout in rollouts)),
        "rollout/unfinished_rate": Mean(sum(not rollout.env_done for rollout in rollouts), count),
    }


def repetition(rollout: Rollout) -> float | None:
    """Return the share of 4-grams within sampled turns that repeat an earlier one; None without 4-grams."""
    turns = [rollout.ids[start:stop] for start, stop in rollout.turns if stop - start >= _NGRAM]
    if not turns:
        return None
    ngrams = np.concatenate([np.lib.stride_tricks.sliding_window_view(turn, _NGRAM) for turn in turns])
    return 1 - len(np.unique(ngrams, axis=0)) / len(ngrams)


class RolloutLog:
    """A writer of rollouts.jsonl. A full file is renamed to rollouts.<last step>.jsonl; the oldest are removed."""

    def __init__(self, folder: Path, settings: RolloutFiles) -> None:
        self.path = folder / "rollouts.jsonl"
        self._settings = settings

    def is_due(self, step: int) -> bool:
        return self._settings.every is not None and step % self._settings.every == 0

    def truncate_after(self, step: int) -> None:
        """Drop rollouts of later steps and a torn last line. Raises DataError if a file is damaged."""
        for file in (*self._full_files(), self.path):
            if file == self.path or _last_step(file) > step:
                self._truncate(file, step)

    def _truncate(self, file: Path, step: int) -> None:
        if not file.exists():
            return
        lines = parse_lines(file, file.read_bytes().split(b"\n"), _read_line, "not a rollout")
        remaining = [line for line in lines if line is not None and line[0] <= step]
        if remaining:
            # A full file is named after its last step, which may have changed.
            new = file if file == self.path else self._full_file(remaining[-1][0])
            write_atomically(new, b"".join(text + b"\n" for _, text in remaining))
            if new == file:
                return
        file.unlink()

    def write(self, step: int, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> None:
        """Append a step's rollouts. rewards: one per rollout, or empty. Raises StorageError if writing fails."""
        values: Sequence[float | None] = rewards or [None] * len(rollouts)
        lines = (_json_line(step, rollout, value) for rollout, value in zip(rollouts, values, strict=True))
        with storage_errors(self.path):
            with open_unlinked(self.path, "a") as file:
                file.writelines(lines)
                size = file.tell()
            if size >= self._settings.file_mb * 10**6:
                os.replace(self.path, self._full_file(step))
                for old in self._full_files()[: -self._settings.keep_files]:
                    old.unlink()

    def _full_file(self, last_step: int) -> Path:
        return self.path.with_name(f"rollouts.{last_step}.jsonl")

    def _full_files(self) -> list[Path]:
        """Return the full files, oldest first."""
        return sorted(self.path.parent.glob("rollouts.*.jsonl"), key=_last_step)


def _last_step(file: Path) -> int:
    return int(file.name.split(".")[1])


def _json_line(step: int, rollout: Rollout, reward: float | None) -> str:
    record: dict[str, Any] = {
        "step": step,
        "version": rollout.version,
        "prompt": rollout.prompt.index,
        "sample": rollout.sample,
        "reward": None if reward is None else _rounded(reward),
        "env_reward": None if rollout.env_reward is None else _rounded(rollout.env_reward),
        "finish_reason": rollout.finish_reason,
        "content": rollout.prompt.content,
        "answer": rollout.prompt.answer,
        "responses": rollout.responses,
        "ids": rollout.ids.tolist(),
        "loss_mask": rollout.loss_mask.astype(int).tolist(),
        "logprobs": [*map(_rounded, rollout.logprobs.tolist())],
        "behaviour_logprobs": [*map(_rounded, rollout.behaviour_logprobs.tolist())],
    }
    # A byte-level tokenizer can produce lone surrogates, which UTF-8 cannot encode.
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode() + "\n"


def _rounded(value: float) -> float | None:
    """Round a number. NaN and infinity, which JSON lacks, become None."""
    return round(value, _DIGITS) if math.isfinite(value) else None


def _read_line(line: bytes) -> tuple[int, bytes] | None:
    """Return a line of the file with its step."""
    return (int(json.loads(line)["step"]), line) if line else None
