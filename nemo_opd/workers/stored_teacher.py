"""A teacher without a model on one data-parallel rank: its stored output, or that of servers (methods.md §9.1)."""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from nemo_opd.config.teacher import TeacherBase
from nemo_opd.errors import ConfigError, EndpointError
from nemo_opd.handoff.hidden_states import HiddenStatesWriter
from nemo_opd.handoff.plan import Readers
from nemo_opd.handoff.sparse import SparseWriter
from nemo_opd.handoff.writer import NewSender
from nemo_opd.models.head import ReadingModel
from nemo_opd.models.stored_output import StoredHiddenStates, StoredTopK, stored_output
from nemo_opd.rollout.base import BatchLimit, Completion, Request, Sampling
from nemo_opd.served.answers import EndpointAnswers, served_layout
from nemo_opd.teacher_cache.reader import CacheReader
from nemo_opd.types import TokenRows
from nemo_opd.workers.frozen import TeacherSource
from nemo_opd.workers.teacher import TeacherOutput, TeacherWorker, Writer

_NO_MODEL = "a teacher that is cached or served answers no questions; write evaluation.teachers=false"


class StoredTeacherWorker(TeacherWorker):
    """A teacher whose output comes from elsewhere in place of a forward pass, and is handed over as any other's."""

    def __init__(
        self, stored: StoredHiddenStates | StoredTopK, settings: TeacherBase, *, device: str, **given: Any
    ) -> None:
        """given: the other arguments of a `TeacherWorker`, of which `handoff` is not used."""
        self._stored = stored
        own = TeacherSource(logit_rows=cast(ReadingModel, stored), use=nullcontext)
        super().__init__(settings, device=device, own=own, **given)

    def _writer(self, settings: TeacherBase, sender: NewSender, *, readers: Readers, num_slots: int) -> Writer:
        stored = self._stored
        if isinstance(stored, StoredTopK):
            return cast(Writer, SparseWriter(sender, stored.layout, readers=readers, num_slots=num_slots))
        size, width, dtype, columns = self.vocab_size, stored.hidden_size, stored.dtype, stored.columns
        return HiddenStatesWriter(sender, size, width, dtype, columns=columns, readers=readers, num_slots=num_slots)

    def likelihoods(self, tokens: TokenRows, micro_batches: Sequence[slice]) -> Tensor:
        """Raise ConfigError: there is no model."""
        raise ConfigError(_NO_MODEL)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, end_ids: Collection[int], limit: BatchLimit
    ) -> list[Completion]:
        """Raise ConfigError: there is no model."""
        raise ConfigError(_NO_MODEL)


class CachedTeacherWorker(StoredTeacherWorker):
    """A teacher whose output is read from a cache."""

    def __init__(self, settings: TeacherBase, *, device: str, **given: Any) -> None:
        """Open the cache. Raises DataError for a cache that cannot be read."""
        assert settings.cache is not None
        super().__init__(stored_output(CacheReader(settings.cache), device), settings, device=device, **given)


class ServedTeacherWorker(StoredTeacherWorker):
    """A teacher whose output servers give, when it is asked for; they must be the ones that preflight has looked at."""

    def __init__(self, settings: TeacherBase, *, key: str, vocab_size: int, device: str, **given: Any) -> None:
        assert settings.served is not None
        layout = served_layout(settings.served, vocab_size)
        self._key = key.removesuffix(".model")
        self._answers = EndpointAnswers(settings.served, settings.reference, layout, key=self._key)
        stored = StoredTopK(self._answers, layout, device)
        super().__init__(stored, settings, key=key, vocab_size=vocab_size, device=device, **given)

    def forward(self, tokens: TokenRows, micro_batches: Sequence[slice], slot: int = 0) -> TeacherOutput:
        """Ask about `tokens`, a microbatch after the other; the output replaces the slot's. Raises EndpointError."""
        before = self._answers.retried
        try:
            made = super().forward(tokens, micro_batches, slot)
        except EndpointError as error:
            raise EndpointError(
                f"{error}; see the server's log, and go on from the newest checkpoint with run.resume=auto, with other "
                f"{self._key}.urls where it stays away"
            ) from error
        return replace(made, retried=self._answers.retried - before)
