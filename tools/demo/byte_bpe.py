"""Trains the demo's two byte-level BPE tokenizers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class BPERecipe:
    """A byte-level BPE: `size` counts its two special tokens, `pattern` is the pre-tokenizer's."""

    size: int
    pattern: str
    eos: str
    pad: str


LLAMA_LIKE = BPERecipe(
    size=2_048,
    pattern=(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    eos="<|end_of_text|>",
    pad="<|pad|>",
)
"""The student's and teacher_same's: digits in groups of up to three."""

QWEN_LIKE = BPERecipe(
    size=3_050,
    pattern=(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    eos="<|endoftext|>",
    pad="<|padding|>",
)
"""teacher_cross's: single digits, and a size that is no multiple of 64."""


def train_bpe(recipe: BPERecipe, texts: Iterator[str]) -> Tokenizer:
    """A byte-level BPE of exactly `recipe.size` tokens: special tokens first, then the 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(recipe.pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.size,
        special_tokens=[recipe.eos, recipe.pad],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != recipe.size:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {recipe.size}: it is too small")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, recipe: BPERecipe, folder: Path) -> None:
    """Write `tokenizer.json` (compact: half the size of the indented form) and `tokenizer_config.json`."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=recipe.eos,
        pad_token=recipe.pad,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
