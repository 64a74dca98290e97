"""A teacher on one data-parallel rank."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.aggregation import joined_scores, sequence_scores, token_nats
from nemo_opd.config.aggregation import Score
from nemo_opd.config.teacher import TeacherBase
from nemo_opd.distributed.transfer import moved
from nemo_opd.handoff.handle import Message
from nemo_opd.handoff.hidden_states import HiddenStatesWriter
from nemo_opd.handoff.link import Link, Rendezvous
from nemo_opd.handoff.logits import LogitsWriter
from nemo_opd.handoff.plan import ONE_READER, Readers
from nemo_opd.handoff.transport import TRANSPORTS
from nemo_opd.handoff.window import OutputHandle
from nemo_opd.handoff.writer import NewSender
from nemo_opd.logits.packed import Packing
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.sparse import SparseLogits
from nemo_opd.models.head import Headless
from nemo_opd.models.load import compute_dtype
from nemo_opd.types import SequenceScores, TokenRows
from nemo_opd.workers.frozen import FrozenWorker, Handoff, TeacherSource
from nemo_opd.workers.memory import handoff_buffer, needs_memory, teacher_tasks


@dataclass(frozen=True, slots=True)
class TeacherOutput:
    """A teacher's output for a rank's rows."""

    handle: OutputHandle
    """Handle of the buffer, valid until the slot is written again."""
    scores: SequenceScores | None
    """Scores on the host; None where the aggregation needs none."""
    seconds: float
    """Time from the call until the output can be read."""
    positions: int
    """Positions, padding included, that the model has read."""
    retried: int | None = None
    """Requests sent again; None without servers."""
    is_answered: Tensor | None = None
    """bool [b, T], on the host: tokens whose log-probability is known; None if that is so of all."""


Writer = HiddenStatesWriter | LogitsWriter


class TeacherWorker(FrozenWorker):
    """A teacher on this rank's rows, with its output in buffers that the student's ranks map.

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
        gives_back: bool = False,
        shares_process: bool = False,
        own: TeacherSource | None = None,
    ) -> None:
        """Load the model, unless `own` is given.

        vocab_size: of the tokenizer; columns of a wider head are never handed over. handoff: the form of the output.
        score: of each sequence, in addition. readers: by rank, the receivers that map its buffers; by default receiver
        0. num_slots: number of batches whose output is kept. gives_back: others need what is cached.
        shares_process: the student's rank of the same number is in this process. Raises ModelError for weights or a
        head that cannot be used, and ClusterError where memory runs out, as `forward` does.
        """
        super().__init__(
            settings,
            teacher_tasks(key.removesuffix(".model"), settings.name),
            key=key,
            vocab_size=vocab_size,
            device=device,
            handoff=handoff,
            gives_back=gives_back,
            own=own,
        )
        self.score, self._buffer_task = score, handoff_buffer(settings.name)
        sender = partial(TRANSPORTS[transport][0], own=dist.get_rank() if shares_process else None)
        own_readers = ONE_READER if readers is None else readers[dist.get_rank()]
        self.link: Link | None = None
        """Link to student ranks on other nodes, if any read its output."""
        self.writer = self._writer(settings, sender, readers=own_readers, num_slots=num_slots)

    def _writer(self, settings: TeacherBase, sender: NewSender, *, readers: Readers, num_slots: int) -> Writer:
        """Return the writer of this form of output."""
        model, dtype = self._model, compute_dtype(settings.dtype, self.device)
        make: Callable[..., Writer]
        if isinstance(self.logit_rows, Headless):
            width = self.logit_rows.hidden_size
            make = partial(HiddenStatesWriter, sender, self.vocab_size, width, dtype, is_fixed=model.is_fixed)
        else:
            make = partial(LogitsWriter, sender, self.vocab_size, dtype)
        return make(columns=self.logit_rows.columns, readers=readers, num_slots=num_slots)

    @torch.no_grad()
    def forward(self, tokens: TokenRows, micro_batches: Sequence[slice], slot: int = 0) -> TeacherOutput:
        """Run the model on `tokens`, a microbatch after the other; the output replaces the slot's."""
        begin = time.perf_counter()
        scores: list[SequenceScores] = []
        answered: list[Tensor] = []
        with needs_memory(self._tasks.reading), self._own.use():
            with needs_memory(self._buffer_task):
                self.writer.begin(sum(tokens.packed_lengths), slot)
            written = positions = 0
            for micro, packing in self._packed(tokens, micro_batches):
                made = self.logit_rows(micro.ids, packing)
                self.writer.write(written, made)
                if isinstance(made, SparseLogits):
                    answered.append(F.pad(made.is_answered, (0, tokens.ids.shape[1] - micro.ids.shape[1]), value=True))
                written += len(packing.tokens)
                positions += self.logit_rows.num_positions(packing)
                if self.score is not None:
                    whole, micro = self._whole(made, micro, packing)
                    scores.append(sequence_scores(whole, micro, score=self.score, vocab_size=self.vocab_size))
            # Waits for the device, so that the host's clock measures the device's work.
            handle = self.writer.handle()
        return TeacherOutput(
            handle,
            joined_scores(scores) if scores else None,
            time.perf_counter() - begin,
            positions,
            is_answered=torch.cat(answered).cpu() if answered else None,
        )

    def _whole(self, made: Any, micro: TokenRows, packing: Packing) -> tuple[LogitRows | Tensor, TokenRows]:
        """Return the logits [b, T, W], and the tokens with a mask that leaves out unanswered ones."""
        if isinstance(made, SparseLogits):
            micro = replace(micro, loss_mask=micro.loss_mask & made.is_answered)
        return self.logit_rows.whole(made, packing), micro

    def _packed(self, tokens: TokenRows, micro_batches: Sequence[slice]) -> Iterator[tuple[TokenRows, Packing]]:
        for sequences in micro_batches:
            micro = tokens.rows(sequences.start, sequences.stop)
            yield moved(micro, self.device), Packing.of(micro).to(self.device)

    @torch.no_grad()
    def token_nats(self, tokens: TokenRows, micro_batches: Sequence[slice]) -> Tensor:
        """Return −log p of the scored tokens that carry text, 0 of others: float64 [B, T], on the host."""
        width, found = tokens.ids.shape[1], []
        with self._own.use():
            for micro, packing in self._packed(tokens, micro_batches):
                whole, micro = self._whole(self.logit_rows(micro.ids, packing), micro, packing)
                nats = token_nats(whole, micro, score="bits_per_byte", vocab_size=self.vocab_size)
                found.append(F.pad(nats, (0, width - nats.shape[1])))
        return torch.cat(found).cpu()

    @torch.no_grad()
    def log_probability(self, tokens: TokenRows, micro_batches: Sequence[slice]) -> SequenceScores:
        """Return the teacher's log-probabilities of the scored tokens of each sequence, on the host."""
        found = []
        with needs_memory(self._tasks.reading), self._own.use():
            for micro, packing in self._packed(tokens, micro_batches):
                whole, micro = self._whole(self.logit_rows(micro.ids, packing), micro, packing)
                found.append(sequence_scores(whole, micro, score="log_probability", vocab_size=self.vocab_size))
        return joined_scores(found)

    def join_link(self, rendezvous: Rendezvous) -> None:
        """Join the link to the student; all ranks of both must call it."""
        self.link = Link(rendezvous, self.device, teacher=dist.get_rank())

    def send(self, messages: Sequence[Message]) -> None:
        """Send rows of the output to ranks of the student, which call `receive` at the same time."""
        assert self.link is not None
        buffers = {sender.identity: sender for sender in self.writer.senders}
        with needs_memory(self._buffer_task):
            self.link.send([(each.payload(buffers[each.sender].last), each.student_rank) for each in messages])

    def close(self) -> None:
        """Release the buffers; the student must have unmapped them."""
        if self.link is not None:
            self.link.close()
        self.writer.close()
        super().close()
