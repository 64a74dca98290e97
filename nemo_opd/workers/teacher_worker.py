"""A teacher on one data-parallel rank: with a model, from a cache or from servers (methods.md §9.1)."""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.aggregation import joined_scores, sequence_scores, token_nats
from nemo_opd.config.objective import Score
from nemo_opd.config.teacher import TeacherBase
from nemo_opd.distributed.transfer import to_device
from nemo_opd.errors import EndpointError
from nemo_opd.handoff.buffer import Message
from nemo_opd.handoff.link import Link, Rendezvous
from nemo_opd.handoff.outputs import HiddenStatesWriter, LogitsWriter, NewSender, OutputHandle, SparseWriter
from nemo_opd.handoff.slices import ONE_READER, Readers
from nemo_opd.handoff.transport import TRANSPORTS
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.rows import LogitRows, SparseLayout, SparseLogits
from nemo_opd.logits.sources import Packing
from nemo_opd.models.causal_model import LogitModel, ReadingModel
from nemo_opd.models.load import compute_dtype
from nemo_opd.models.stored_output import StoredHiddenStates, StoredTopK, served_layout, stored_output
from nemo_opd.served.answers import EndpointAnswers
from nemo_opd.teacher_cache.reader import CacheReader
from nemo_opd.types import SequenceScores, TokenRows
from nemo_opd.workers.frozen import FrozenWorker, Handoff, TeacherSource
from nemo_opd.workers.out_of_memory import handoff_buffer, needs_memory, teacher_tasks

_BLOCK_BYTES = 2**28
"""Memory budget of a block of log-probabilities."""
_LIVE_COPIES = 5
"""Peak number of live tensors the size of a block's log-probabilities."""


@dataclass(frozen=True, slots=True)
class TeacherOutput:
    """A teacher's output for a rank's rows."""

    handle: OutputHandle
    """Handle of the buffer, valid until the slot is overwritten."""
    scores: SequenceScores | None
    """Scores on the host, or None if the aggregation does not need them."""
    seconds: float
    """Time from the call until the output is readable."""
    positions: int
    """Positions, including padding, that the model has read."""
    retried: int | None = None
    """Number of retried requests, or None for a teacher without servers."""
    is_answered: Tensor | None = None
    """bool [b, T] on the host: false for tokens with unknown log-probability. None if all are known."""


Writer = HiddenStatesWriter | LogitsWriter


class TeacherWorker(FrozenWorker):
    """A teacher that reads this rank's rows and writes its output to buffers that the student's ranks map.

    Communicates FSDP2's all-gathers of parameters over the teacher's group. Output for ranks on other nodes goes over
    a link to the student's group.
    """

    def __init__(
        self,
        settings: TeacherBase,
        *,
        key: str,
        vocab_size: int,
        device: str,
        transport: str,
        handoff: Handoff,
        score: Score | None = None,
        readers: Sequence[Readers] | None = None,
        num_slots: int = 1,
        empties_cache: bool = False,
        shares_process: bool = False,
        source: TeacherSource | None = None,
        column_order: NDArray[np.int64] | None = None,
    ) -> None:
        """Load the model, or use `source`.

        vocab_size: size of the tokenizer; extra columns of the head are never handed over. handoff: form of the output.
        score: score to compute for each sequence. readers: for each rank, the receivers that map its buffers; receiver
        0 by default. num_slots: number of batches whose output is kept. empties_cache: release cached device memory
        after use. shares_process: the student's rank with the same number is in this process. column_order:
        `order` of `HiddenStatesWriter`; scores and texts do not depend on it. Raises ModelError for unusable weights or
        an unusable head, and, like `forward`, ClusterError if memory runs out.
        """
        super().__init__(
            settings,
            teacher_tasks(key.removesuffix(".model"), settings.name),
            key=key,
            vocab_size=vocab_size,
            device=device,
            handoff=handoff,
            empties_cache=empties_cache,
            source=source,
        )
        self.score, self._buffer_task = score, handoff_buffer(settings.name)
        sender = partial(TRANSPORTS[transport][0], own=dist.get_rank() if shares_process else None)
        rank_readers = ONE_READER if readers is None else readers[dist.get_rank()]
        self.link: Link | None = None
        """Link to student ranks on other nodes that read the output, if any."""
        self._column_order = column_order
        self.writer = self._build_writer(sender, rank_readers, num_slots)

    def _build_writer(self, sender: NewSender, readers: Readers, num_slots: int) -> Writer:
        rows: Any = self.logit_rows  # a model, or stored output in its place
        if isinstance(rows, StoredTopK):
            return cast(Writer, SparseWriter(sender, rows.layout, readers=readers, num_slots=num_slots))
        is_stored = isinstance(rows, StoredHiddenStates)
        dtype = rows.dtype if is_stored else compute_dtype(self._settings.dtype, self.device)
        if isinstance(rows, LogitModel):
            columns = rows.columns
            return LogitsWriter(sender, self.vocab_size, dtype, columns=columns, readers=readers, num_slots=num_slots)
        return HiddenStatesWriter(
            sender,
            self.vocab_size,
            rows.hidden_size,
            dtype,
            columns=rows.columns,
            readers=readers,
            num_slots=num_slots,
            is_fixed=self._source.is_fixed,
            order=self._column_order,
        )

    @torch.no_grad()
    def forward(self, tokens: TokenRows, micro_batches: Sequence[slice], slot: int = 0) -> TeacherOutput:
        """Run the model on `tokens` per microbatch; the output replaces the slot's previous one."""
        begin = time.perf_counter()
        scores: list[SequenceScores] = []
        answered: list[Tensor] = []
        with needs_memory(self._tasks.reading), self._source.use():
            with needs_memory(self._buffer_task):
                self.writer.begin(sum(tokens.packed_lengths), slot)
            written = positions = 0
            for micro, packing in self._packed_micro_batches(tokens, micro_batches):
                output = self.logit_rows(micro.ids, packing)
                self.writer.write(written, output)
                if isinstance(output, SparseLogits):
                    padding = (0, tokens.ids.shape[1] - micro.ids.shape[1])
                    answered.append(F.pad(output.is_answered, padding, value=True))
                written += len(packing.tokens)
                positions += self.logit_rows.num_positions(packing)
                if self.score is not None:
                    logits, micro = self._scored_logits(output, micro, packing)
                    scores.append(sequence_scores(logits, micro, score=self.score, vocab_size=self.vocab_size))
            # Waits for the device, so that the host clock includes its work.
            handle = self.writer.handle()
        return TeacherOutput(
            handle,
            joined_scores(scores) if scores else None,
            time.perf_counter() - begin,
            positions,
            is_answered=torch.cat(answered).cpu() if answered else None,
        )

    def _scored_logits(self, output: Any, micro: TokenRows, packing: Packing) -> tuple[LogitRows | Tensor, TokenRows]:
        """Return the logits [b, T, W], and the tokens with unanswered ones masked out."""
        if isinstance(output, SparseLogits):
            micro = replace(micro, loss_mask=micro.loss_mask & output.is_answered)
        return self.logit_rows.whole(output, packing), micro

    def _packed_micro_batches(
        self, tokens: TokenRows, micro_batches: Sequence[slice]
    ) -> Iterator[tuple[TokenRows, Packing]]:
        for sequences in micro_batches:
            micro = tokens.rows(sequences.start, sequences.stop)
            yield to_device(micro, self.device), Packing.of(micro).to(self.device)

    @torch.no_grad()
    def token_nats(self, tokens: TokenRows, micro_batches: Sequence[slice]) -> Tensor:
        """Return −log p of scored tokens that carry text, 0 elsewhere: float64 [B, T], on the host."""
        width, parts = tokens.ids.shape[1], []
        with self._source.use():
            for micro, packing in self._packed_micro_batches(tokens, micro_batches):
                logits, micro = self._scored_logits(self.logit_rows(micro.ids, packing), micro, packing)
                nats = token_nats(logits, micro, score="bits_per_byte", vocab_size=self.vocab_size)
                parts.append(F.pad(nats, (0, width - nats.shape[1])))
        return torch.cat(parts).cpu()

    @torch.no_grad()
    def log_probability(self, tokens: TokenRows, micro_batches: Sequence[slice]) -> SequenceScores:
        """Return the log-probability of each sequence's scored tokens, as scores on the host."""
        scores = []
        with needs_memory(self._tasks.reading), self._source.use():
            for micro, packing in self._packed_micro_batches(tokens, micro_batches):
                logits, micro = self._scored_logits(self.logit_rows(micro.ids, packing), micro, packing)
                scores.append(sequence_scores(logits, micro, score="log_probability", vocab_size=self.vocab_size))
        return joined_scores(scores)

    def join_link(self, rendezvous: Rendezvous) -> None:
        """Join the link to the student. Collective over all ranks of both models."""
        self.link = Link(rendezvous, self.device, teacher=dist.get_rank())

    def send(self, messages: Sequence[Message]) -> None:
        """Send rows of the output to student ranks, which must call `receive` at the same time."""
        assert self.link is not None
        buffers = {sender.identity: sender for sender in self.writer.senders}
        with needs_memory(self._buffer_task):
            self.link.send(
                [(message.payload(buffers[message.sender].last), message.student_rank) for message in messages]
            )

    def close(self) -> None:
        """Release the buffers. The student must have unmapped them."""
        if self.link is not None:
            self.link.close()
        self.writer.close()
        super().close()


class CachedTeacherWorker(TeacherWorker):
    """A teacher that hands over output from a cache instead of running a forward pass."""

    def __init__(self, settings: TeacherBase, *, device: str, **arguments: Any) -> None:
        """Open the cache. Raises DataError for a cache that cannot be read."""
        assert settings.cache is not None
        source = _source_of(stored_output(CacheReader(settings.cache), device))
        super().__init__(settings, device=device, source=source, **arguments)


class ServedTeacherWorker(TeacherWorker):
    """A teacher that requests its output from servers, which preflight must have checked."""

    def __init__(self, settings: TeacherBase, *, key: str, vocab_size: int, device: str, **arguments: Any) -> None:
        assert settings.served is not None
        layout = served_layout(settings.served, vocab_size)
        self._key = key.removesuffix(".model")
        self._answers = EndpointAnswers(settings.served, settings.reference, layout, key=self._key)
        source = _source_of(StoredTopK(self._answers, layout, device))
        super().__init__(settings, key=key, vocab_size=vocab_size, device=device, source=source, **arguments)

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


def _source_of(stored: StoredHiddenStates | StoredTopK) -> TeacherSource:
    return TeacherSource(logit_rows=cast(ReadingModel, stored), use=nullcontext)


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
