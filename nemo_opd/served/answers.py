"""Answers of a teacher's servers to token sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_opd.config.endpoint import Endpoint
from nemo_opd.errors import EndpointError
from nemo_opd.logits.sparse import SparseLayout
from nemo_opd.rollout.server.client import Client
from nemo_opd.rollout.server.http import MAX_BYTES
from nemo_opd.served.programs import PROGRAMS
from nemo_opd.served.rows import encoded_rows
from nemo_opd.teacher_cache.shard import Segment, encoded_ids, id_bytes

_ENTRY_BYTES = 256
"""Upper bound of a reply's bytes per log-probability."""
_Ids = NDArray[np.integer[Any]]


def served_layout(endpoint: Endpoint, vocab_size: int) -> SparseLayout:
    """Return the layout of rows from servers."""
    return SparseLayout(min(endpoint.logprobs, vocab_size), vocab_size, 4, id_bytes(vocab_size))


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
