"""Tokenizers for tests: real ones from a folder, and small ones trained here."""

from __future__ import annotations

import json
import os
import struct
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5Tokenizer,
)

from tests import costs

SHARED = Path(__file__).resolve().parents[2] / "shared"
REAL = ("llama3_1", "qwen3", "gemma3", "gpt4o")
DIGITS_BY_THREE = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+| ?\p{L}+|\s+"
DIGITS_ONE_BY_ONE = r"\p{N}|[^\s\p{L}\p{N}]+|\s?\p{L}+|\s+"
CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox doesn't. 2024 12 123 45 777 11 100",
    "def f(x):\n    return x + 1\n\n    # the function of the fox\n",
    "Größe, naïve, año, Čeština. Ein schöner Tag, ein schöner Abend.",
    "東京タワーは東京にある。東京の天気。你好，世界。你好。 한국어 한국",
    "Русский текст о русском языке. Ещё текст. 👍🏽 👩‍👩‍👧‍👦 👍🏽",
] * 4


@cache
def real_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return a real tokenizer of `$NEMO_OPD_TOKENIZERS`, or skip the test."""
    costs.refuse("reads a real tokenizer", "tokenizers")
    folder = Path(os.environ.get("NEMO_OPD_TOKENIZERS", SHARED / "tokenizers")) / name
    if not folder.is_dir():
        pytest.skip(f"no tokenizer at {folder}; set NEMO_OPD_TOKENIZERS")
    return AutoTokenizer.from_pretrained(folder)


@cache
def corpus_texts() -> tuple[str, ...]:
    """Return the documents of `$NEMO_OPD_CORPUS`, or skip the test."""
    costs.refuse("reads the corpus", "tokenizers")
    file = Path(os.environ.get("NEMO_OPD_CORPUS", SHARED / "corpus")) / "multidomain.jsonl"
    if not file.is_file():
        pytest.skip(f"no corpus at {file}; set NEMO_OPD_CORPUS")
    return tuple(json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines())


@cache
def byte_level(
    size: int = 600,
    pattern: str = DIGITS_BY_THREE,
    eos: str = "<|eot_id|>",
    extra: tuple[str, ...] = ("<|begin_of_text|>",),
    nfc: bool = False,
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with all 256 bytes; `extra` are more special tokens."""
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[eos, *extra],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)


@cache
def sentencepiece(size: int = 700, dummy_prefix: bool = False) -> PreTrainedTokenizerFast:
    """Train a BPE with `▁`, `<0xHH>` for characters without a piece, and runs of spaces as added tokens.

    dummy_prefix: put a space before every text, which the decoder strips, as Llama-2 does.
    """
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁?[^▁\d]+|\d|▁+"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[*special, *fallback, "▁▁"], show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(model["vocab"], merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = trained.normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    if dummy_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(content, special=True) for content in special])
    tokenizer.add_tokens([AddedToken("▁▁", normalized=False), AddedToken("▁▁▁▁▁▁▁", normalized=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end_of_turn>", bos_token="<bos>", pad_token="<pad>", unk_token="<unk>"
    )


def rebuilt(tokenizer: PreTrainedTokenizerBase, **parts: object) -> PreTrainedTokenizerFast:
    """Return a copy with new parts of its backend: normalizer, pre_tokenizer, decoder, model."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    for name, part in parts.items():
        setattr(backend, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tokenizer.eos_token)


@cache
def byte_level_with_prefix() -> PreTrainedTokenizerFast:
    """Return a tokenizer with GPT-2's pre-tokenizer, which puts a space before every text without one."""
    return rebuilt(byte_level(610), pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))


@cache
def ranks() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE as converted from tiktoken: whole pieces are found, also if no merge leads to them."""
    trained = json.loads(byte_level(620).backend_tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in trained["merges"]]
    tokenizer = rebuilt(byte_level(620), model=models.BPE(trained["vocab"], merges[::2], ignore_merges=True))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved_special_token_0|>", "<|python_tag|>"]})
    tokenizer.add_tokens(["<think>", AddedToken("<tool_call>", lstrip=True, rstrip=True)])
    return tokenizer


@cache
def unigram(
    scheme: str = "always", normalizer: str = "precompiled", byte_fallback: bool = False
) -> PreTrainedTokenizerFast:
    """Train a unigram model behind Metaspace; scheme: when it puts a space before a text (always, first, never)."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = {
        "precompiled": normalizers.Precompiled(
            charsmap({"ﬁ": "fi", "Ａ": "A", "\u3000": " ", "½": "1⁄2", "\u200b": ""})
        ),
        "nfkc": normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), normalizers.Strip()]),
        "lower": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]),
    }[normalizer]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    specials = ["<pad>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256) if byte_fallback)]
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=specials, unk_token="<unk>", show_progress=False, n_sub_iterations=1
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    vocab = [(piece, score) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]]
    parts = tokenizer.normalizer, tokenizer.pre_tokenizer
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=2, byte_fallback=byte_fallback))
    tokenizer.normalizer, tokenizer.pre_tokenizer = parts
    decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoder]) if byte_fallback else decoder
    tokenizer.add_special_tokens(specials[:3])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def charsmap(mapping: dict[str, str]) -> bytes:
    """Compile SentencePiece's normalisation rules: a double-array trie of UTF-8 keys, then the replacements.

    A unit has its label in the lowest 8 bits, in bit 8 whether it has a value, and its children's offset from bit 10.
    """
    texts, value_of = b"", {}
    for key, text in sorted(mapping.items()):
        value_of[key.encode()] = len(texts)
        texts += text.encode() + b"\0"
    units = {0: 0}
    pending = [(b"", 0)]
    while pending:
        prefix, place = pending.pop()
        longer = [key for key in value_of if key.startswith(prefix) and key != prefix]
        labels = {key[len(prefix)] for key in longer} | ({0} if prefix in value_of else set())
        offset = next(o for o in range(256, 1 << 20) if not any(place ^ o ^ label in units for label in labels))
        units[place] |= offset << 10 | (prefix in value_of) << 8
        for label in labels:
            units[place ^ offset ^ label] = label or 1 << 31 | value_of[prefix]
            if label:
                pending.append((prefix + bytes([label]), place ^ offset ^ label))
    array = [units.get(place, 1 << 31) for place in range(max(units) // 256 * 256 + 256)]
    return struct.pack(f"<I{len(array)}I", 4 * len(array), *array) + texts


@cache
def llama_class(dummy_prefix: bool = True) -> PreTrainedTokenizerBase:
    """Return transformers 5's Llama class with the model of `sentencepiece`. dummy_prefix: a space before texts."""
    model = json.loads(sentencepiece().backend_tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    return LlamaTokenizer(
        vocab=model["vocab"], merges=merges, bos_token="<bos>", eos_token="<eos>", add_prefix_space=dummy_prefix
    )


@cache
def t5_class() -> PreTrainedTokenizerBase:
    """Return transformers 5's T5 class with the vocabulary of `unigram`: white space becomes one space."""
    vocab = json.loads(unigram().backend_tokenizer.to_str())["model"]["vocab"]
    return T5Tokenizer(vocab=[(piece, score) for piece, score in vocab], extra_ids=3)


def word_piece() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens do not spell the text."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "##s": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids without the special tokens that a post-processor adds."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]
