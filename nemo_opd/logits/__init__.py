"""Rows of logits: their sources, their division into blocks, and the sums of terms over them."""

from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.planned import compute_together
from nemo_opd.logits.rows import LogitRows, TensorLogits
from nemo_opd.logits.sources import AveragedLogits, ContextParallelLogits, SideBySideLogits, VocabParallelLogits

__all__ = [
    "AveragedLogits",
    "ContextParallelLogits",
    "Head",
    "HeadLogits",
    "LogitRows",
    "SideBySideLogits",
    "TensorLogits",
    "VocabParallelLogits",
    "compute_together",
]
