"""Validation bits per byte of a saved model: comparable between tokenizers."""

import math
from pathlib import Path

import torch
from recipes import SEQUENCE
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

BATCH = 16


@torch.inference_mode()
def bits_per_byte(folder: Path, texts: list[str]) -> float:
    """Nats over byte-carrying label tokens / ln 2 / their bytes, in fp32.

    Documents are cut into sequences of SEQUENCE tokens. A token is a label where it is not special
    and has a predecessor in its sequence.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    bytes_of_id = _bytes_of_id(tokenizer, model.config.vocab_size)
    documents = tokenizer(texts, add_special_tokens=False)["input_ids"]
    sequences = [ids[start : start + SEQUENCE] for ids in documents for start in range(0, len(ids), SEQUENCE)]
    sequences.sort(key=len)
    nats, num_bytes = 0.0, 0
    for start in range(0, len(sequences), BATCH):
        rows = [torch.tensor(ids) for ids in sequences[start : start + BATCH]]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
        label_bytes = bytes_of_id[ids[:, 1:]].flatten()
        losses = F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        nats += losses[label_bytes > 0].double().sum().item()
        num_bytes += int(label_bytes.sum())
    return nats / math.log(2) / num_bytes


def _bytes_of_id(tokenizer: PreTrainedTokenizerBase, size: int) -> torch.Tensor:
    """Bytes each id [size] stands for: one a character in the byte-level alphabet, none for special and padding ids."""
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.all_special_ids)
    lengths = [0 if i in special else len(piece) for i, piece in enumerate(pieces)]
    return torch.tensor(lengths + [0] * (size - len(lengths)))
