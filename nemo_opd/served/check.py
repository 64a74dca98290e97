"""A check before a run that servers serve the model, return enough log-probabilities, and agree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_opd.config.endpoint import Endpoint
from nemo_opd.errors import EndpointError
from nemo_opd.rollout.server.http import Http, UnansweredError
from nemo_opd.served.agreement import check_agreement
from nemo_opd.served.answers import EndpointAnswers, served_layout
from nemo_opd.served.programs import PROGRAMS
from nemo_opd.users_code import shown

_LIST_TIMEOUT_S = 30.0
"""Limit of the request for the list of models."""


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
