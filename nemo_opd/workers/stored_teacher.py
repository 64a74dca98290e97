"""Teachers without a local model: output from a cache or from servers (methods.md §9.1)."""

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

_NO_MODEL = "a cached or served teacher cannot answer questions; set evaluation.teachers=false"


class StoredTeacherWorker(TeacherWorker):
    """A teacher that hands over stored output instead of running a forward pass."""

    def __init__(
        self, stored: StoredHiddenStates | StoredTopK, settings: TeacherBase, *, device: str, **arguments: Any
    ) -> None:
        """Store the arguments. arguments: the remaining arguments of `TeacherWorker`; `handoff` is ignored."""
        self._stored = stored
        source = TeacherSource(logit_rows=cast(ReadingModel, stored), use=nullcontext)
        super().__init__(settings, device=device, source=source, **arguments)

    def _build_writer(self, settings: TeacherBase, sender: NewSender, *, readers: Readers, num_slots: int) -> Writer:
        stored = self._stored
        if isinstance(stored, StoredTopK):
            return cast(Writer, SparseWriter(sender, stored.layout, readers=readers, num_slots=num_slots))
        size, width, dtype, columns = self.vocab_size, stored.hidden_size, stored.dtype, stored.columns
        return HiddenStatesWriter(sender, size, width, dtype, columns=columns, readers=readers, num_slots=num_slots)

    def likelihoods(self, tokens: TokenRows, micro_batches: Sequence[slice]) -> Tensor:
        """Raise ConfigError: the teacher has no model here."""
        raise ConfigError(_NO_MODEL)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, end_ids: Collection[int], limit: BatchLimit
    ) -> list[Completion]:
        """Raise ConfigError: the teacher has no model here."""
        raise ConfigError(_NO_MODEL)


class CachedTeacherWorker(StoredTeacherWorker):
    """A teacher with output from a cache."""

    def __init__(self, settings: TeacherBase, *, device: str, **arguments: Any) -> None:
        """Open the cache. Raises DataError for a cache that cannot be read."""
        assert settings.cache is not None
        super().__init__(stored_output(CacheReader(settings.cache), device), settings, device=device, **arguments)


class ServedTeacherWorker(StoredTeacherWorker):
    """A teacher that requests its output from servers, which preflight must have checked."""

    def __init__(self, settings: TeacherBase, *, key: str, vocab_size: int, device: str, **arguments: Any) -> None:
        assert settings.served is not None
        layout = served_layout(settings.served, vocab_size)
        self._key = key.removesuffix(".model")
        self._answers = EndpointAnswers(settings.served, settings.reference, layout, key=self._key)
        stored = StoredTopK(self._answers, layout, device)
        super().__init__(stored, settings, key=key, vocab_size=vocab_size, device=device, **arguments)

    def forward(self, tokens: TokenRows, micro_batches: Sequence[slice], slot: int = 0) -> TeacherOutput:
        """Query the servers per microbatch; the output replaces the slot's previous one. Raises EndpointError."""
        earlier_retries = self._answers.retried
        try:
            output = super().forward(tokens, micro_batches, slot)
        except EndpointError as error:
            raise EndpointError(
                f"{error}; see the server's log, and continue from the newest checkpoint with run.resume=auto; change "
                f"{self._key}.urls if the server stays down"
            ) from error
        return replace(output, retried=self._answers.retried - earlier_retries)
