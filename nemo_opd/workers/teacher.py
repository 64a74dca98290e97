"""A frozen teacher on one data-parallel rank."""

from typing import Any

import torch
from torch import Tensor

from nemo_opd.config.teacher import TeacherBase
from nemo_opd.distributed.process_group import data_parallel_mesh
from nemo_opd.handoff.base import Handle
from nemo_opd.handoff.logits import LogitsWriter
from nemo_opd.handoff.transport import TRANSPORTS
from nemo_opd.losses.bits_per_byte import bits_per_byte
from nemo_opd.models.load import load_model
from nemo_opd.models.parallelize import shard
from nemo_opd.types import Mean, TokenRows
from nemo_opd.workers.offload import move, resident


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
    ) -> None:
        """`vocab_size` is the tokenizer's; columns of a wider head are never handed over."""
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
    def forward(self, tokens: TokenRows) -> Handle:
        """Score `tokens`; the handle is to logits [B, T, W] in bf16, valid until the next call."""
        with resident(self.model, self.device, offload=self.offload):
            writer = LogitsWriter(self.sender, len(tokens), tokens.ids.shape[1], self.vocab_size)
            for start in range(0, len(tokens), self.micro_batch_size):
                micro = tokens.rows(start, start + self.micro_batch_size).to(self.device)
                writer.write(start, self._logits(micro))
            return writer.handle()

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
