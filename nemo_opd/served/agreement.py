"""A comparison of a teacher's servers on the same texts, requested alone and in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.config.endpoint import Endpoint
from nemo_opd.errors import EndpointError
from nemo_opd.logging.busy import print_line
from nemo_opd.logits.sparse import SparseRows
from nemo_opd.served.answers import EndpointAnswers, served_layout
from nemo_opd.teacher_cache.shard import Segment

LARGEST_DISAGREEMENT = 1.0
"""Largest difference of a log-probability that rounding explains, in nats.

In bfloat16, a logit below 64 is off by at most 1/8, and so is the log of the sum, so two answers differ by up to 1/2.
The limit is twice as large because rounding also affects hidden states and the choice of experts.
"""
TEXTS = (
    "The station was built in 1871 on the north bank of the river. Two years later a second line joined it from the "
    "coast, and by the end of the century more than four hundred trains stopped there each day.",
    "def mean(values: list[float]) -> float:\n    total = 0.0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n",
    "Q: A shop sells pencils at 12 for 3.60. What do 35 cost?\nA: One costs 3.60 / 12 = 0.30, so 35 cost 10.50.\n",
    "Wenn es morgen regnet, fahren wir mit dem Zug; sonst nehmen wir die Räder und essen unterwegs am See.",
    "El puerto abre a las seis. Los barcos pequeños salen primero, y los grandes esperan a que suba la marea.",
    "今天下午我们去图书馆借了三本书,回来的路上下起了小雨。",
)
"""Texts of several kinds for the comparison."""


def check_agreement(
    endpoint: Endpoint, model: str, sequences: Sequence[NDArray[Any]], *, key: str, vocab_size: int
) -> None:
    """Query each server with the sequences, one at a time and all at once, and print the largest disagreement.

    Raises EndpointError with the servers' names if it exceeds `LARGEST_DISAGREEMENT`, and as `EndpointAnswers` does.
    """
    at_once = endpoint.model_copy(update={"concurrency": len(sequences)})
    alone, batched = (
        [_query(settings, url, model, sequences, key, vocab_size) for url in endpoint.urls]
        for settings in (endpoint.model_copy(update={"concurrency": 1}), at_once)
    )
    in_batch = [_largest_difference(*answers) for answers in zip(alone, batched, strict=True)]
    between = [_largest_difference(alone[0], answers) for answers in alone]
    differences = f"{max(in_batch):.2g} nats between a text alone and in a batch"
    if len(endpoint.urls) > 1:
        differences += f", {max(between):.2g} between servers"
    print_line(f"{key}: log-probabilities of its servers differ by at most {differences}")
    for i, (url, difference) in enumerate(zip(endpoint.urls, in_batch, strict=True)):
        if difference > LARGEST_DISAGREEMENT:
            raise EndpointError(
                f"{key}.urls.{i}={url} gives a token another log-probability alone than in a batch: they differ by "
                f"{difference:.3g} nats, but rounding explains only {LARGEST_DISAGREEMENT:g}; probably its prefix "
                "cache or a batched kernel is wrong: start it without a prefix cache, or with another attention backend"
            )
    for i, (url, difference) in enumerate(zip(endpoint.urls, between, strict=True)):
        if difference > LARGEST_DISAGREEMENT:
            raise EndpointError(
                f"{key}.urls: {endpoint.urls[0]} and {url} differ by {difference:.3g} nats in the log-probability of a "
                f"token of the same text, but rounding explains only {LARGEST_DISAGREEMENT:g}; probably they serve "
                f"different models, revisions or quantisations of {model}: start the same model on both, or leave "
                f"{key}.urls.{i} out"
            )


def _query(
    endpoint: Endpoint, url: str, model: str, sequences: Sequence[NDArray[Any]], key: str, vocab_size: int
) -> list[SparseRows]:
    layout = served_layout(endpoint, vocab_size)
    answers = EndpointAnswers(endpoint.model_copy(update={"urls": (url,)}), model, layout, key=key)

    def decoded(segment: Segment) -> SparseRows:
        return layout.decode(torch.from_numpy(segment.rows))

    return [decoded(segment) for segment in answers.segments(sequences)]


def _largest_difference(ours: Sequence[SparseRows], theirs: Sequence[SparseRows]) -> float:
    """Return the largest difference, in nats, over tokens with a log-probability in both answers."""
    differences = [_difference(a, b) for rows in zip(ours, theirs, strict=True) for a, b in _common_logprobs(*rows)]
    return max(differences, default=0.0)


def _common_logprobs(ours: SparseRows, theirs: SparseRows) -> list[tuple[Tensor, Tensor]]:
    """Pair the log-probabilities of next tokens, and of likeliest tokens with the same id."""
    by_id = theirs.ids.sort(dim=1)
    column = torch.searchsorted(by_id.values, ours.ids).clamp(max=ours.ids.shape[1] - 1)
    aligned = theirs.log_p.gather(1, by_id.indices).gather(1, column)
    is_common = by_id.values.gather(1, column) == ours.ids
    return [(ours.log_p_next, theirs.log_p_next), (ours.log_p[is_common], aligned[is_common])]


def _difference(ours: Tensor, theirs: Tensor) -> float:
    is_finite = ours.isfinite() & theirs.isfinite()
    differences = (ours - theirs)[is_finite].abs()
    return float(differences.max()) if len(differences) else 0.0
