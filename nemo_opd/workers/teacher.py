"""A frozen teacher on one data-parallel rank."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nemo_opd.aggregation import joined, sequence_scores
from nemo_opd.config.aggregation import Score
from nemo_opd.config.teacher import TeacherBase
from nemo_opd.distributed.process_group import data_parallel_mesh
from nemo_opd.handoff.hidden_states import HiddenStatesHandle, HiddenStatesWriter
from nemo_opd.handoff.logits import LogitsHandle, LogitsWriter
from nemo_opd.handoff.transport import TRANSPORTS
from nemo_opd.losses.bits_per_byte import bits_per_byte
from nemo_opd.models.head import Headless, WithHead
from nemo_opd.models.load import load_model
from nemo_opd.models.parallelize import shard
from nemo_opd.types import Mean, SequenceScores, TokenRows
from nemo_opd.workers.offload import move, resident

OutputHandle = HiddenStatesHandle | LogitsHandle


@dataclass(frozen=True, slots=True)
class Scored:
    """What a teacher makes of a rank's rows."""

    handle: OutputHandle
    """To its output, valid until the next call."""
    scores: SequenceScores | None
    """On the host; None where the aggregation asks for none."""


class TeacherWorker:
    """Scores this rank's rows and leaves its output where the student's worker of the same rank can map it.

    Communicates FSDP2's all-gathers of parameters over the teacher's own group, nothing else.
    """

    def __init__(
        self,
        settings: TeacherBase,
        *,
        key: str,
        vocab_size: int,
        micro_batch_size: int,
        device: str,
        transport: str,
        handoff: Literal["hidden_states", "logits"],
        score: Score | None = None,
    ) -> None:
        """`vocab_size` is the tokenizer's; what a wider head has beyond it is never handed over.

        handoff: what is. score: what `forward` says about each sequence besides. Raises ModelError for weights that
        cannot be loaded, or a head that cannot be handed over.
        """
        self.score = score
        self.vocab_size = vocab_size
        self.micro_batch_size = micro_batch_size
        self.device = device
        self.offload = settings.offload
        dtype = getattr(torch, settings.dtype)
        self.model = load_model(settings.model, dtype, key=key).eval().requires_grad_(False)
        shard(self.model, data_parallel_mesh(device), compute_dtype=dtype)
        if not self.offload:
            move(self.model, device)
        sender, _ = TRANSPORTS[transport]
        self.logit_rows: Callable[[Tensor], Any]
        """Ids [B, T] → logits [B, T, ≥ W], of the kind that `writer` takes."""
        self.writer: HiddenStatesWriter | LogitsWriter
        if handoff == "hidden_states":
            headless = Headless(self.model, key=key)
            self.logit_rows = headless
            self.writer = HiddenStatesWriter(sender, vocab_size, headless.hidden_size, dtype)
        else:
            self.logit_rows = WithHead(self.model)
            self.writer = LogitsWriter(sender(), vocab_size, dtype)

    @torch.no_grad()
    def forward(self, tokens: TokenRows) -> Scored:
        """Score `tokens`."""
        scores: list[SequenceScores] = []
        with resident(self.model, self.device, offload=self.offload):
            self.writer.begin(len(tokens), tokens.ids.shape[1])
            for start in range(0, len(tokens), self.micro_batch_size):
                micro = tokens.rows(start, start + self.micro_batch_size).to(self.device)
                made = self.logit_rows(micro.ids)
                self.writer.write(start, made)
                if self.score is not None:
                    scores.append(sequence_scores(made, micro, score=self.score, vocab_size=self.vocab_size))
            return Scored(self.writer.handle(), joined(scores) if scores else None)

    @torch.no_grad()
    def bits_per_byte(self, tokens: TokenRows) -> Mean:
        """The teacher's own quality on these texts."""
        result = Mean(0.0, 0.0)
        with resident(self.model, self.device, offload=self.offload):
            for start in range(0, len(tokens), self.micro_batch_size):
                micro = tokens.rows(start, start + self.micro_batch_size).to(self.device)
                result = result.merge(bits_per_byte(self.logit_rows(micro.ids), micro, vocab_size=self.vocab_size))
        return Mean(float(result.total), float(result.count))

    def close(self) -> None:
        """Release the buffers; the student must have dropped its mappings."""
        self.writer.close()
        move(self.model, "cpu")
