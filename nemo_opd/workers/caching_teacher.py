"""A teacher whose output fills a cache."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.packed import Packing
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.sparse import SparseLayout
from nemo_opd.types import TokenRows
from nemo_opd.workers.memory import needs_memory
from nemo_opd.workers.teacher import TeacherWorker

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
