"""Logits over the ranks of a group."""

import torch.distributed as dist

from nemo_opd.distributed.collectives import VocabularyShards
from nemo_opd.logits.head import HeadLogits
from nemo_opd.logits.rows import TensorLogits
from nemo_opd.logits.sources import VocabParallelLogits


def vocab_parallel(local: TensorLogits | HeadLogits, group: dist.ProcessGroup) -> VocabParallelLogits:
    """Return logits whose columns lie on the ranks, these being this rank's. Collective."""
    return VocabParallelLogits(local, VocabularyShards(group, local.shape[2], local.device))
