"""Vocabulary-parallel logits for tests."""

import torch.distributed as dist

from nemo_opd.distributed.collectives import VocabularyShards
from nemo_opd.logits.head import HeadLogits
from nemo_opd.logits.rows import TensorLogits
from nemo_opd.logits.sources import VocabParallelLogits


def vocab_parallel(local: TensorLogits | HeadLogits, group: dist.ProcessGroup) -> VocabParallelLogits:
    """Return logits whose columns are split over the group's ranks; `local` has this rank's columns. Collective."""
    return VocabParallelLogits(local, VocabularyShards(group, local.shape[2], local.device))
