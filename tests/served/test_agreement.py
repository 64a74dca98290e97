"""The comparison of a teacher's servers on the same texts before a run."""

import threading

import numpy as np
import pytest
from torch import Tensor

from nemo_opd.config.teacher import Endpoint
from nemo_opd.errors import EndpointError
from nemo_opd.served.answers import LARGEST_DISAGREEMENT, check_agreement
from tests.rollout.fake_server import Json, Responder
from tests.served.endpoint import MODEL, answering, endpoint, of_uniform

VOCAB = 50
SEQUENCES = [np.arange(first, first + 12, dtype=np.int32) for first in (1, 5, 30)]


def shifted_by(nats: float) -> Responder:
    """Return answers of a server whose logit of token 9 is `nats` higher after position 7."""

    def scores(ids: list[int]) -> Tensor:
        logits = of_uniform(VOCAB)(ids).clone()
        logits[7, 9] += nats
        return logits.log_softmax(1)

    return answering(scores)


def checked(*urls: str) -> None:
    settings = Endpoint(urls=urls, logprobs=20, retries=0)
    check_agreement(settings, MODEL, SEQUENCES, key="teachers.0", vocab_size=VOCAB)


def test_servers_that_agree_are_reported_with_their_difference(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a bound below bfloat16's rounding, and a difference over tokens that only one server returns."""
    with endpoint(shifted_by(0.0)) as (first, _), endpoint(shifted_by(0.3)) as (second, _):
        checked(first, second)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        "teachers.0: log-probabilities of its servers differ by at most 0 nats between a text alone and in a batch, "
        "0.3 between servers"
    )


def test_servers_of_different_models_are_refused_by_name() -> None:
    """Catches a second server with another revision that differs at a single position."""
    different = shifted_by(1.2 + LARGEST_DISAGREEMENT)
    with (
        endpoint(shifted_by(0.0)) as (first, _),
        endpoint(different) as (second, _),
        pytest.raises(EndpointError, match=r"nats in the log-probability of a token of the same text") as caught,
    ):
        checked(first, second)
    start = f"teachers.0.urls: {first} and {second} differ by 2."
    for part in (start, "revisions or quantisations of big", "leave teachers.0.urls.1 out"):
        assert part in str(caught.value)


def test_a_server_with_other_answers_in_a_batch_is_refused_by_name() -> None:
    """Catches a comparison of single requests only, or of a batch with itself."""
    together, lock, num_requests = threading.Barrier(len(SEQUENCES), timeout=30), threading.Lock(), [0]
    right, wrong = shifted_by(0.0), shifted_by(4.0)

    def respond(body: Json) -> tuple[int, Json]:
        with lock:
            num_requests[0] += 1
            is_alone = num_requests[0] <= len(SEQUENCES)
        if is_alone:
            return right(body)
        together.wait()  # until all requests of the batch have arrived
        return wrong(body)

    refused = r"teachers.0.urls.0=http\S+ gives .* alone than in a batch.*prefix cache"
    with endpoint(respond) as (url, _), pytest.raises(EndpointError, match=refused):
        checked(url)


def test_a_missing_log_probability_does_not_hide_a_disagreement() -> None:
    """Catches a NaN that makes every comparison false."""

    def respond(body: Json) -> tuple[int, Json]:
        status, reply = shifted_by(0.0)(body)
        reply["choices"][0]["prompt_logprobs"][4].clear()
        return status, reply

    with (
        endpoint(respond) as (first, _),
        endpoint(shifted_by(3.0)) as (second, _),
        pytest.raises(EndpointError, match=r"differ by \d"),
    ):
        checked(first, second)
