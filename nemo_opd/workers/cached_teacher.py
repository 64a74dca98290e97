"""A teacher that was asked before, on one data-parallel rank: no model, but what it once said (methods.md §9.1)."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from nemo_opd.aggregation import sequence_scores
from nemo_opd.config.aggregation import Score
from nemo_opd.config.teacher import TeacherBase
from nemo_opd.errors import ConfigError
from nemo_opd.handoff.hidden_states import HiddenStatesWriter
from nemo_opd.handoff.plan import ONE_READER, Readers
from nemo_opd.handoff.sparse import SparseWriter
from nemo_opd.handoff.transport import TRANSPORTS
from nemo_opd.models.stored_output import StoredHiddenStates, StoredTopK, stored_output
from nemo_opd.rollout.base import Completion, Request, Sampling
from nemo_opd.teacher_cache.reader import CacheReader
from nemo_opd.types import Mean, TokenRows
from nemo_opd.workers.memory import handoff_buffer, teacher_forward
from nemo_opd.workers.teacher import TeacherWorker


class CachedTeacherWorker(TeacherWorker):
    """A teacher whose output is read from a cache in place of a forward pass, and handed over as any other's."""

    def __init__(
        self,
        settings: TeacherBase,
        *,
        key: str,
        vocab_size: int,
        device: str,
        transport: str,
        handoff: Literal["hidden_states", "logits"],
        score: Score | None = None,
        readers: Sequence[Readers] | None = None,
        num_slots: int = 1,
        gives_back: bool = False,
        shares_process: bool = False,
    ) -> None:
        """Open the cache; arguments are those of a `TeacherWorker`, of which `handoff` says nothing here.

        Raises DataError for a cache that cannot be read.
        """
        assert settings.cache is not None
        self.score, self.vocab_size, self.device = score, vocab_size, device
        teacher = key.removesuffix(".model")
        self._forward_task, self._buffer_task = teacher_forward(teacher, settings.name), handoff_buffer(settings.name)
        self._own = _NoModel()  # type: ignore[assignment]
        self.link = None
        sender = partial(TRANSPORTS[transport][0], own=dist.get_rank() if shares_process else None)
        own_readers = ONE_READER if readers is None else readers[dist.get_rank()]
        stored = stored_output(CacheReader(settings.cache), device)
        self.logit_rows = stored  # type: ignore[assignment]
        writer: Callable[..., SparseWriter | HiddenStatesWriter]
        if isinstance(stored, StoredTopK):
            writer = partial(SparseWriter, sender, stored.layout)
        else:
            columns = stored.columns
            writer = partial(HiddenStatesWriter, sender, vocab_size, stored.hidden_size, stored.dtype, columns=columns)
        self.writer = writer(readers=own_readers, num_slots=num_slots)  # type: ignore[assignment]

    @torch.no_grad()
    def bits_per_byte(self, tokens: TokenRows, micro_batches: Sequence[slice]) -> Mean:
        """Return the teacher's bits per byte on these texts."""
        if isinstance(self.logit_rows, StoredHiddenStates):
            return super().bits_per_byte(tokens, micro_batches)
        bits = num_bytes = 0.0
        for micro, packing in self._packed(tokens, micro_batches):
            whole = self.logit_rows.whole(self.logit_rows(micro.ids, packing), packing)
            scores = sequence_scores(whole, micro, score="bits_per_byte", vocab_size=self.vocab_size)
            bits, num_bytes = bits + float(scores.bits.sum()), num_bytes + float(scores.num_bytes.sum())
        return Mean(bits, num_bytes)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, end_ids: Collection[int], batch_size: int
    ) -> list[Completion]:
        """Raise ConfigError: there is no model."""
        raise ConfigError("a cached teacher answers no questions; write evaluation.teachers=false")


class _NoModel:
    """Stand-in for a teacher without a model."""

    @contextmanager
    def use(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        pass
