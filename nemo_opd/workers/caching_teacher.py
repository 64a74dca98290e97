"""A teacher that is asked once, for a cache."""

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
"""Tensors of the size of a block's log-probabilities alive at a time."""


class CachingTeacher(TeacherWorker):
    """A teacher whose output is returned as bytes for a cache, and not handed over.

    Communicates as `TeacherWorker` does, and what the ranks of a tensor-parallel group need to read whole rows.
    """

    @torch.no_grad()
    def answers(
        self, tokens: TokenRows, micro_batches: Sequence[slice], layout: SparseLayout | None, with_head: bool
    ) -> tuple[list[Tensor], Head | None]:
        """Return what is stored of each sequence, uint8 [length, bytes] on the host.

        layout: of the likeliest tokens; None: hidden states. with_head: return as well the rows of the head that this
        rank has, without those beyond the tokenizer's vocabulary. Raises ClusterError where memory runs out.
        """
        found: list[Tensor] = []
        head = None
        with needs_memory(self._tasks.reading), self._own.use():
            for micro, packing in self._packed(tokens, micro_batches):
                made = self.logit_rows(micro.ids, packing)
                if layout is None:
                    assert isinstance(made, HeadLogits)
                    head = self._cut(made.head) if with_head else None
                    hidden = made.hidden.squeeze(0).to(self.dtype).contiguous()
                    rows = hidden.view(torch.uint8)
                else:
                    whole = self.logit_rows.whole(made, packing)
                    rows = torch.cat(list(_encoded(whole, micro, packing, layout)))
                found += rows.cpu().split(list(packing.lengths))
        return found, head

    @property
    def dtype(self) -> torch.dtype:
        """Precision of hidden states and head."""
        return next(self.model.parameters()).dtype

    def _cut(self, head: Head) -> Head:
        """Return a copy, on the host, of the rows of the tokenizer's vocabulary."""

        def own(part: Tensor) -> Tensor:
            # Gathered weights are freed after the call.
            number = max(0, self.vocab_size - self.logit_rows.columns.start)
            return part.detach()[:number].to(self.dtype).cpu().clone()

        return Head(own(head.weight), None if head.bias is None else own(head.bias), head.scale, head.soft_cap)


def _encoded(whole: LogitRows, micro: TokenRows, packing: Packing, layout: SparseLayout) -> Iterator[Tensor]:
    """Yield the encoded rows of a microbatch, block by block."""
    following = F.pad(micro.ids[:, 1:], (0, 1), value=-1).flatten().index_select(0, packing.tokens)
    following[packing.bounds[1:].long() - 1] = -1
    places = torch.arange(len(following), device=following.device)
    for rows in places.split(max(1, _BLOCK_BYTES // (4 * _LIVE_COPIES * layout.vocab_size))):
        log_p = whole.read(packing.tokens[rows], layout.vocab_size).float().log_softmax(1)
        yield layout.encode(log_p, following[rows])
