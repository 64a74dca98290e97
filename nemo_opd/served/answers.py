"""Answers of a teacher's servers to token sequences, and checks before a run that the servers agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.config.teacher import Endpoint
from nemo_opd.errors import EndpointError
from nemo_opd.logging.terminal import print_line
from nemo_opd.logits.rows import SparseLayout, SparseRows
from nemo_opd.models.stored_output import served_layout
from nemo_opd.rollout.server.client import MAX_BYTES, Client, Http, UnansweredError
from nemo_opd.served.programs import PROGRAMS, encoded_rows
from nemo_opd.teacher_cache.shard import Segment, encoded_ids
from nemo_opd.users_code import shown

_Ids = NDArray[np.integer[Any]]
_ENTRY_BYTES = 256
"""Upper bound of a reply's bytes per log-probability."""
_LIST_TIMEOUT_S = 30.0
"""Limit of the request for the list of models."""
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


class EndpointAnswers:
    """A client that turns servers' answers about token ids into segments. It checks that the answers have these ids."""

    def __init__(self, endpoint: Endpoint, model: str, layout: SparseLayout, *, key: str) -> None:
        """model: its name on the servers. key: the teacher's section in the settings, for messages."""
        self._program = PROGRAMS[endpoint.program]()
        self._model, self._layout, self._key = model, layout, key
        self._client: Client[NDArray[np.uint8]] = Client(
            urls=[url.rstrip("/") + self._program.path for url in endpoint.urls],
            concurrency=endpoint.concurrency,
            timeout_s=endpoint.request_timeout_s,
            retries=endpoint.retries,
            trust_env=True,
            key=key,
            error=EndpointError,
            headers=endpoint.headers,
        )

    @property
    def retried(self) -> int:
        """Number of requests sent again, so far."""
        return self._client.retried

    def segments(self, sequences: Sequence[_Ids]) -> list[Segment]:
        """Query sequences of at least two ids. Raises EndpointError if all tries of one fail."""
        ids = [sequence.tolist() for sequence in sequences]
        bodies = [self._program.body(prompt, self._model, self._layout.top_k) for prompt in ids]
        longest = max(map(len, ids), default=0)
        self._client.max_bytes = max(MAX_BYTES, _ENTRY_BYTES * longest * (self._layout.top_k + 2))

        def read(number: int, reply: Any) -> NDArray[np.uint8]:
            return encoded_rows(self._program.read(reply, ids[number], self._model), sequences[number], self._layout)

        try:
            rows = self._client.complete(bodies, read)
        except EndpointError as error:
            raise EndpointError(f"{self._key}: {error}") from error
        tokens = (encoded_ids(sequence, self._layout.id_bytes) for sequence in sequences)
        return [Segment(*pair) for pair in zip(tokens, rows, strict=True)]


def check_endpoint(
    endpoint: Endpoint, model: str, *, key: str, vocab_size: int, token: int, texts: Sequence[Sequence[int]]
) -> int | None:
    """Query each server for its models, for a prompt of two tokens, and for `texts` alone and in a batch.

    key: the teacher's section in the settings. token: one of its tokenizer's highest ids. texts: ids of a few texts;
    they are cut to the length that all servers accept. Prints the largest disagreement. Returns the longest prompt that
    all servers accept; None if they do not report it. Raises EndpointError with the address if a server does not
    answer, serves another model, returns too few log-probabilities or other tokens, or if answers about a text disagree
    by more than rounding explains.
    """
    limits = [_longest(endpoint, i, model, key) for i in range(len(endpoint.urls))]
    for i in range(len(endpoint.urls)):
        _query_two_tokens(endpoint, i, model, key, vocab_size, token)
    longest = min((limit for limit in limits if limit is not None), default=None)
    sequences = [np.array(ids[:longest], np.int32) for ids in texts if len(ids[:longest]) > 1]
    if sequences:
        check_agreement(endpoint, model, sequences, key=key, vocab_size=vocab_size)
    return longest


def _longest(endpoint: Endpoint, i: int, model: str, key: str) -> int | None:
    """Return the longest prompt that server `i` accepts; None if it does not report it."""
    url = endpoint.urls[i]
    where = f"{key}.urls.{i}={url}"
    timeout_s = min(_LIST_TIMEOUT_S, endpoint.request_timeout_s)
    http = Http(url.rstrip("/"), timeout_s, trust_env=True, error=EndpointError, headers=endpoint.headers)
    try:
        listed = http.get("/v1/models")
    except EndpointError as error:
        raise EndpointError(
            f"{where} does not answer: {error}; start the server, correct the address, or set {key}.api_key if it "
            "needs one"
        ) from error
    try:
        cards = {str(card["id"]): card for card in listed["data"]}
    except (KeyError, TypeError) as error:
        raise EndpointError(
            f"{where}: /v1/models does not list models as OpenAI's does, but returns {shown(listed)}; correct the "
            "address"
        ) from error
    if model not in cards:
        raise EndpointError(
            f"{where} serves {', '.join(cards) or 'nothing'} and not {model}; correct {key}.model, which is its name "
            "on the server, or the address"
        )
    limit = cards[model].get("max_model_len")
    return limit - PROGRAMS[endpoint.program].unused_positions if isinstance(limit, int) else None


def _query_two_tokens(endpoint: Endpoint, i: int, model: str, key: str, vocab_size: int, token: int) -> None:
    one = endpoint.model_copy(update={"urls": (endpoint.urls[i],), "retries": 0})
    layout = served_layout(endpoint, vocab_size)
    try:
        EndpointAnswers(one, model, layout, key=key).segments([np.array([0, token], np.int32)])
    except EndpointError as error:
        if isinstance(_root_cause(error), UnansweredError):
            raise EndpointError(
                f"{error}; see the server's log, wait until it has room, raise {key}.request_timeout_s, or leave "
                f"{key}.urls.{i} out"
            ) from error
        raise EndpointError(
            f"{error}; the server must return {layout.top_k} log-probabilities ({key}.logprobs) per prompt token: "
            f"lower that, allow more on the server ({PROGRAMS[endpoint.program].hint}), correct {key}.program="
            f"{endpoint.program} or {key}.tokenizer, or set {key}.api_key if the server needs one"
        ) from error


def _root_cause(error: EndpointError) -> BaseException | None:
    """Return the first cause that is not an EndpointError."""
    cause: BaseException | None = error
    while isinstance(cause, EndpointError):
        cause = cause.__cause__
    return cause


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
    return [layout.decode(torch.from_numpy(segment.rows)) for segment in answers.segments(sequences)]


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
