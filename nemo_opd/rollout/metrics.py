"""Metrics of rollouts: lengths, ends, repetition, turns and calls."""

from collections.abc import Sequence

import numpy as np

from nemo_opd.data.record import Rollout
from nemo_opd.types import Max, Mean, Metric, Sum

_NGRAM = 4


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
