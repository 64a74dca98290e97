"""Trains one demo model: plain next-token prediction on packed sequences, AdamW, fp32, one thread."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from byte_bpe import save_tokenizer
from recipes import CONTEXT, SEED, SEQUENCE, ModelRecipe
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
GRADIENT_CLIP = 1.0
INIT_STD = 0.06
FINAL_RATE = 0.01
"""The cosine ends at this fraction of the peak learning rate."""
IGNORED = -100
"""The label of a position that is not learned: what torch's cross-entropy leaves out."""

Report = Callable[[int, float], None]


@dataclass(frozen=True)
class Budget:
    """Training and its cosine end at the first of `steps` and `seconds`; only steps give the same model again."""

    steps: int
    seconds: float = math.inf


@dataclass(frozen=True)
class Examples:
    """A batch: token ids [B, S], and for each the id that follows it, or IGNORED."""

    inputs: torch.Tensor
    labels: torch.Tensor


def build_model(recipe: ModelRecipe, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A fresh fp32 Llama with tied embeddings; the token ids of `tokenizer` are in its config.

    The projections back into the residual stream start at zero: drawn like the rest they drown the token's own
    embedding, and a model this small then spends its first half million tokens near the unigram entropy.
    """
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=recipe.head_rows,
            hidden_size=recipe.width,
            intermediate_size=recipe.mlp_width,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.kv_heads,
            max_position_embeddings=CONTEXT,
            initializer_range=INIT_STD,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.token_to_id(recipe.bpe.eos),
            pad_token_id=tokenizer.token_to_id(recipe.bpe.pad),
        )
    )
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


class PackedSequences:
    """Endless batches [batch, SEQUENCE + 1]: documents with an end token each, packed in a new order every epoch."""

    def __init__(self, documents: list[list[int]], eos: int, batch: int, generator: torch.Generator) -> None:
        self._documents = [torch.tensor([*ids, eos], dtype=torch.int32) for ids in documents]
        self._batch = batch
        self._generator = generator
        self._rows = torch.empty(0, SEQUENCE + 1, dtype=torch.int32)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        """The next batch of token ids, int64."""
        while len(self._rows) < self._batch:
            self._rows = torch.cat([self._rows, self._epoch()])
        batch, self._rows = self._rows[: self._batch], self._rows[self._batch :]
        return batch.long()

    def _epoch(self) -> torch.Tensor:
        order = torch.randperm(len(self._documents), generator=self._generator).tolist()
        stream = torch.cat([self._documents[i] for i in order])
        num_rows = len(stream) // (SEQUENCE + 1)
        return stream[: num_rows * (SEQUENCE + 1)].view(num_rows, SEQUENCE + 1)


def train(
    recipe: ModelRecipe,
    tokenizer: Tokenizer,
    texts: list[str],
    budget: Budget,
    report: Report,
) -> LlamaForCausalLM:
    """The model of `recipe`, trained on `texts`, at the end of `budget`."""
    torch.manual_seed(SEED)
    model = build_model(recipe, tokenizer)
    documents = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    packed = PackedSequences(
        documents, tokenizer.token_to_id(recipe.bpe.eos), recipe.batch, torch.Generator().manual_seed(SEED)
    )
    fit(model, recipe, map(_next_tokens, packed), budget, report)
    return model


def fit(
    model: LlamaForCausalLM, recipe: ModelRecipe, batches: Iterator[Examples], budget: Budget, report: Report
) -> None:
    """Train `model` until the end of `budget`, a batch a step; `report(step, nats per label)` is called after each."""
    optimizer = _optimizer(model, recipe.learning_rate)
    started, step, spent = time.monotonic(), 0, 0.0
    while spent < 1:
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _rate(step, recipe.warmup, spent)
        examples = next(batches)
        loss = F.cross_entropy(model(examples.inputs).logits.flatten(0, 1), examples.labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        spent = max(step / budget.steps, (time.monotonic() - started) / budget.seconds)
        report(step, loss.item())


def _next_tokens(ids: torch.Tensor) -> Examples:
    return Examples(ids[:, :-1], ids[:, 1:])


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, recipe: ModelRecipe, folder: Path) -> None:
    """Write the Hugging Face folder (weights in bf16, configs, tokenizer), readable by all: safetensors writes 0600."""
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(tokenizer, recipe.bpe, folder)
    for file in folder.iterdir():
        file.chmod(0o644)


def _optimizer(model: LlamaForCausalLM, learning_rate: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS)


def _rate(step: int, warmup: int, spent: float) -> float:
    cosine = FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * spent))
    return min(1.0, (step + 1) / warmup) * cosine
