"""Bits per byte of a model on the validation texts, computed with transformers alone.

A check of what the product's validation says, and the measure of models that another trainer has made.
"""

import json
import math
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def bits_per_byte(
    model_folder: Path, validation: Path, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> dict[str, float]:
    """Return bits per byte over all texts, under the key `all`, and by domain. The tokenizer is a byte-level one.

    The first token of a text is no target, and neither it nor an end-of-text token counts, as in the product.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype).to(device).eval()
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for line in validation.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        ids = torch.tensor([tokenizer(row["text"])["input_ids"]], device=device)
        with torch.no_grad():
            scores = model(ids).logits[0, :-1].float().log_softmax(-1)
        nats = -scores.gather(1, ids[0, 1:, None]).sum().item()
        first = int(ids[0, 0])
        # A character of a byte-level token stands for a byte, also where the token is a part of a character.
        unscored = 0 if first in tokenizer.all_special_ids else len(tokenizer.convert_ids_to_tokens(first))
        scored = len(row["text"].encode()) - unscored
        for key in ("all", row["domain"]):
            sums[key][0] += nats / math.log(2)
            sums[key][1] += scored
    return {key: bits / size for key, (bits, size) in sorted(sums.items())}
