"""Teachers without a local model: output from a cache or from servers (methods.md §9.1)."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.config.teacher import TeacherBase
from nemo_opd.errors import ConfigError, EndpointError
from nemo_opd.handoff.outputs import HiddenStatesWriter, NewSender, SparseWriter
from nemo_opd.handoff.plan import Readers
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.rows import LogitRows, SparseLayout
from nemo_opd.logits.sources import Packing
from nemo_opd.models.head import ReadingModel
from nemo_opd.models.stored_output import StoredHiddenStates, StoredTopK, stored_output
from nemo_opd.rollout.base import BatchLimit, Completion, Request, Sampling
from nemo_opd.served.answers import EndpointAnswers, served_layout
from nemo_opd.teacher_cache.reader import CacheReader
from nemo_opd.types import TokenRows
from nemo_opd.workers.frozen import TeacherSource
from nemo_opd.workers.memory import needs_memory
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


_BLOCK_BYTES = 2**28
_LIVE_COPIES = 5
"""Peak number of live tensors the size of a block's log-probabilities."""


class CachingTeacher(TeacherWorker):
    """A teacher that returns its output as bytes for a cache instead of handing it to a student.

    Communicates as `TeacherWorker` does, and over the tensor-parallel group to read full rows.
    """

    @torch.no_grad()
    def answers(
        self, tokens: TokenRows, micro_batches: Sequence[slice], layout: SparseLayout | None, with_head: bool
    ) -> tuple[list[Tensor], Head | None]:
        """Return the bytes to store for each sequence, uint8 [length, bytes] on the host.

        layout: layout of the stored likeliest tokens, or None to store hidden states. with_head: also return this
        rank's rows of the head, without rows beyond the tokenizer's vocabulary. Raises ClusterError if memory runs out.
        """
        stored: list[Tensor] = []
        head = None
        with needs_memory(self._tasks.reading), self._source.use():
            for micro, packing in self._packed_micro_batches(tokens, micro_batches):
                output = self.logit_rows(micro.ids, packing)
                if layout is None:
                    assert isinstance(output, HeadLogits)
                    head = self._vocab_head(output.head) if with_head else None
                    hidden = output.hidden.squeeze(0).to(self.dtype).contiguous()
                    rows = hidden.view(torch.uint8)
                else:
                    logits = self.logit_rows.whole(output, packing)
                    rows = torch.cat(list(_encode_blocks(logits, micro, packing, layout)))
                stored += rows.cpu().split(list(packing.lengths))
        return stored, head

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of hidden states and head."""
        return next(self.model.parameters()).dtype

    def _vocab_head(self, head: Head) -> Head:
        """Copy the head's rows of the tokenizer's vocabulary to the host."""

        def to_host(weight: Tensor) -> Tensor:
            # A copy, because gathered weights are freed after the call.
            num_rows = max(0, self.vocab_size - self.logit_rows.columns.start)
            return weight.detach()[:num_rows].to(self.dtype).cpu().clone()

        bias = None if head.bias is None else to_host(head.bias)
        return Head(to_host(head.weight), bias, head.scale, head.soft_cap)


def _encode_blocks(logits: LogitRows, micro: TokenRows, packing: Packing, layout: SparseLayout) -> Iterator[Tensor]:
    """Encode the rows of a microbatch block by block."""
    following = F.pad(micro.ids[:, 1:], (0, 1), value=-1).flatten().index_select(0, packing.tokens)
    following[packing.bounds[1:].long() - 1] = -1
    places = torch.arange(len(following), device=following.device)
    for rows in places.split(max(1, _BLOCK_BYTES // (4 * _LIVE_COPIES * layout.vocab_size))):
        log_p = logits.read(packing.tokens[rows], layout.vocab_size).float().log_softmax(1)
        yield layout.encode(log_p, following[rows])
