"""Bits per byte of two models with different tokenizers, on the same bytes of the same texts (methods.md §1.8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from nemo_opd.alignment import TokenAligner
from nemo_opd.data.collate import collate
from nemo_opd.data.encoders import Encoder
from nemo_opd.data.samples import Sample
from nemo_opd.data.text import CrossTokenizer, TextSampleMaker, TextWindowMaker
from nemo_opd.distributed.transfer import to_device
from nemo_opd.errors import DataError
from nemo_opd.logits.packed import Packing
from nemo_opd.losses.bits_per_byte import bits_per_byte
from nemo_opd.models.head import HiddenStateModel, LogitModel
from nemo_opd.progress import tracked
from nemo_opd.types import Batch, Mean, TokenRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_WINDOWS = 16
"""Windows per batch."""


def same_texts(
    texts: Sequence[str],
    new: PreTrainedTokenizerBase,
    old: PreTrainedTokenizerBase,
    aligner: TokenAligner,
    *,
    max_length: int,
    num_old_rows: int,
) -> list[Batch]:
    """Cut texts into windows of at most `max_length` tokens of either tokenizer; the old one is the batches' teacher.

    num_old_rows: ids that the old model can read. Raises DataError if no byte is predicted by both models.
    """
    reader = CrossTokenizer(Encoder.of(old, max_length, append_eos=False, vocab_size=num_old_rows), aligner)
    student = Encoder.of(new, max_length, append_eos=False)
    windows_of = TextWindowMaker(TextSampleMaker(student, (reader,)))
    samples: list[Sample] = [window for text in texts if text for window in windows_of(text)]
    batches = [collate(samples[start : start + _WINDOWS]) for start in range(0, len(samples), _WINDOWS)]
    if not any(int(batch.student.num_bytes.sum()) for batch in batches):
        raise DataError("the texts have no byte that both models predict; give longer texts")
    return batches


def mean_bits_per_byte(model: PreTrainedModel, rows: Sequence[TokenRows], *, vocab_size: int) -> Mean:
    """Return the model's mean bits per byte over all rows. vocab_size: size of its tokenizer's vocabulary."""
    is_linear = type(model.get_output_embeddings()) is nn.Linear
    source = HiddenStateModel(model, key="model") if is_linear else LogitModel(model)
    device = str(model.device)
    bits = num_bytes = 0.0
    with torch.no_grad():
        for batch in tracked(rows, "bits per byte", "batches"):
            packing, tokens = Packing.of(batch).to(device), to_device(batch, device)
            mean = bits_per_byte(source.whole(source(tokens.ids, packing), packing), tokens, vocab_size=vocab_size)
            bits, num_bytes = bits + float(mean.total), num_bytes + float(mean.count)
    return Mean(bits, num_bytes)
