"""A frozen teacher on one data-parallel rank."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_opd.aggregation import joined, sequence_scores
from nemo_opd.config.aggregation import Score
from nemo_opd.config.teacher import TeacherBase
from nemo_opd.distributed.process_group import data_parallel_mesh
from nemo_opd.handoff.base import Handle
from nemo_opd.handoff.logits import LogitsWriter
from nemo_opd.handoff.transport import TRANSPORTS
from nemo_opd.losses.bits_per_byte import bits_per_byte
from nemo_opd.models.load import load_model
from nemo_opd.models.parallelize import shard
from nemo_opd.types import Mean, SequenceScores, TokenRows
from nemo_opd.workers.offload import move, resident


@dataclass(frozen=True, slots=True)
class Scored:
    """What a teacher makes of a rank's rows."""

    handle: Handle
    """To its logits [B, T, W] in bf16, valid until the next call."""
    scores: SequenceScores | None
    """On the host; None where the aggregation asks for none."""


class TeacherWorker:
    """Scores this rank's rows and leaves the logits where the student's worker of the same rank can map them.

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
        score: Score | None = None,
    ) -> None:
        """`vocab_size` is the tokenizer's; columns of a wider head are never handed over.

        score: what `forward` says about each sequence besides.
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
        self.sender = sender()

    @torch.no_grad()
    def forward(self, tokens: TokenRows) -> Scored:
        """Score `tokens`."""
        scores: list[SequenceScores] = []
        with resident(self.model, self.device, offload=self.offload):
            writer = LogitsWriter(self.sender, len(tokens), tokens.ids.shape[1], self.vocab_size)
            for start in range(0, len(tokens), self.micro_batch_size):
                micro = tokens.rows(start, start + self.micro_batch_size).to(self.device)
                logits_BTW = self._logits(micro)
                writer.write(start, logits_BTW)
                if self.score is not None:
                    scores.append(sequence_scores(logits_BTW, micro, score=self.score, vocab_size=self.vocab_size))
            return Scored(writer.handle(), joined(scores) if scores else None)

    @torch.no_grad()
    def bits_per_byte(self, tokens: TokenRows) -> Mean:
        """The teacher's own quality on these texts."""
        result = Mean(0.0, 0.0)
        with resident(self.model, self.device, offload=self.offload):
            for start in range(0, len(tokens), self.micro_batch_size):
                micro = tokens.rows(start, start + self.micro_batch_size).to(self.device)
                result = result.merge(bits_per_byte(self._logits(micro), micro, vocab_size=self.vocab_size))
        return Mean(float(result.total), float(result.count))

    def _logits(self, micro: TokenRows) -> Tensor:
        model: Any = self.model
        logits: Tensor = model(input_ids=micro.ids, use_cache=False).logits
        return logits

    def close(self) -> None:
        """Release the buffer; the student must have dropped its mapping."""
        self.sender.close()
        move(self.model, "cpu")
