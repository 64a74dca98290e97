"""A tokenizer's model without normaliser and pre-tokenizer, on any bytes."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nemo_opd.alignment import pieces_of
from nemo_opd.projection.retokenization import RawModel
from tests.tokenizers_fixture import byte_level, encode, real_tokenizer, sentencepiece


def raw_model(tokenizer: PreTrainedTokenizerBase) -> RawModel:
    return RawModel(tokenizer.backend_tokenizer, pieces_of(tokenizer))


def unigram() -> PreTrainedTokenizerFast:
    """Return a model that prefers `▁a` and `b` to `▁ab`, contrary to merging by rank."""
    fallback = [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    letters = [("▁", -3.0), ("▁a", -1.0), ("b", -1.0), ("▁ab", -9.0), ("京", -4.0)]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *letters, *fallback], unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


TOKENIZERS = [byte_level(), sentencepiece(), sentencepiece(dummy_prefix=True), unigram()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte_level", "sentencepiece", "dummy_prefix", "unigram"])
@pytest.mark.parametrize(
    "piece", [b"\xe6", b" \xe6\x9d", b"a\xff", b"\x80\x80", "京\U0001f600".encode()[:-1], b"\xffab\xe4\xba\xac\x80"]
)
def test_half_characters_keep_their_bytes(tokenizer: PreTrainedTokenizerBase, piece: bytes) -> None:
    """Catches bytes that become U+FFFD."""
    pieces = pieces_of(tokenizer)
    assert b"".join(map(pieces.bytes_of, raw_model(tokenizer).encode(piece))) == piece


def test_agrees_with_the_tokenizer_on_words() -> None:
    """Compare with the whole tokenizer, on words that its pre-tokenizer does not split."""
    tokenizer = byte_level()
    model = raw_model(tokenizer)
    for word in ("The", " quick", " function", "Größe", "東京タワー", " Русский", "...", "123"):
        assert model.encode(word.encode()) == encode(tokenizer, word)


def test_a_unigram_takes_its_likeliest_pieces() -> None:
    tokenizer = unigram()
    assert tokenizer.convert_ids_to_tokens(raw_model(tokenizer).encode(b" ab")) == ["▁a", "b"]


@pytest.mark.tokenizers
@pytest.mark.parametrize("name", ["llama3_1", "qwen3", "gemma3", "gpt4o"])
def test_a_real_piece_is_its_own_spelling(name: str) -> None:
    """Catches pieces that encode to other tokens; `ignore_merges` finds the few of Llama-3 that no merges reach."""
    tokenizer = real_tokenizer(name)
    pieces, model = pieces_of(tokenizer), raw_model(real_tokenizer(name))
    ids = np.flatnonzero(pieces.lengths > 1)[::97].tolist()
    is_single = [model.encode(pieces.bytes_of(token_id)) == [token_id] for token_id in ids]
    assert len(ids) > 1000
    assert np.mean(is_single) == 1.0 if name == "llama3_1" else np.mean(is_single) > 0.95


def test_a_missing_byte_gives_no_spelling() -> None:
    """Bug: an error for a vocabulary that lacks some bytes."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.decoder = decoders.ByteLevel()
    small = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    model = RawModel(small.backend_tokenizer, pieces_of(byte_level()))
    assert model.encode(b"ab") == [2]
    assert model.encode(b"\xff") == []
