"""id → bytes: spelled by the tokenizer itself, for each kind of vocabulary."""

import copy

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nemo_opd.alignment import fingerprint, pieces_of
from nemo_opd.alignment.pieces import ADDED, BYTE_FALLBACK, HOLE, ORDINARY
from nemo_opd.errors import AlignmentError
from tests.tokenizers_fixture import (
    REAL,
    byte_level,
    corpus_texts,
    encode,
    real_tokenizer,
    sentencepiece,
    word_piece,
)

TEXT = "  The naïve 東京 👩‍👩‍👧‍👦\n\n\tfox ▁ \u0001 12345"


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["byte_level", "sentencepiece"])
def test_pieces_spell_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """Catches a wrong byte alphabet and wrong fallback bytes."""
    pieces = pieces_of(tokenizer)
    text = TEXT.replace("▁", "_")
    assert b"".join(map(pieces.bytes_of, encode(tokenizer, text))) == text.encode()


@pytest.mark.parametrize("name", REAL)
def test_real_pieces_spell_the_corpus(name: str) -> None:
    """What the normaliser leaves of a text, byte for byte."""
    tokenizer = real_tokenizer(name)
    pieces = pieces_of(tokenizer)
    normalizer = tokenizer.backend_tokenizer.normalizer
    for text in corpus_texts()[::9]:
        normal = normalizer.normalize_str(text) if normalizer else text
        expected = normal.replace("▁", " ") if name == "gemma3" else normal
        ids = encode(tokenizer, text)
        if pieces.is_special[ids].any():
            continue
        assert b"".join(map(pieces.bytes_of, ids)) == expected.encode()


def test_runs_of_spaces_stored_in_normalised_form_are_spaces() -> None:
    """Catches Gemma's added token `▁▁` taken for six bytes of U+2581."""
    tokenizer = sentencepiece()
    pieces = pieces_of(tokenizer)
    assert pieces.bytes_of(tokenizer.convert_tokens_to_ids("▁▁")) == b"  "
    outside_the_model = tokenizer.convert_tokens_to_ids("▁" * 7)
    assert (pieces.origin[outside_the_model], pieces.bytes_of(outside_the_model)) == (ADDED, b" " * 7)
    assert outside_the_model in encode(tokenizer, "a" + " " * 7 + "b")


def test_an_added_token_spells_what_the_normaliser_made_of_it() -> None:
    """A dummy prefix is put before an added token's content too, once and for all."""
    tokenizer = copy.deepcopy(sentencepiece(dummy_prefix=True))
    tokenizer.add_tokens([AddedToken("<think>", normalized=True)])
    (token_id,) = set(encode(tokenizer, "a <think>b")) - set(encode(tokenizer, "ab"))
    assert pieces_of(tokenizer).bytes_of(token_id) == b" <think>"


def test_special_tokens_have_no_bytes() -> None:
    tokenizer = byte_level()
    pieces = pieces_of(tokenizer)
    assert pieces.is_special[tokenizer.eos_token_id]
    assert pieces.bytes_of(tokenizer.eos_token_id) == b""
    assert pieces.lengths[tokenizer.eos_token_id] == 0


def test_origins_and_fallback_bytes() -> None:
    tokenizer = sentencepiece()
    pieces = pieces_of(tokenizer)
    newline = tokenizer.convert_tokens_to_ids("<0x0A>")
    assert pieces.bytes_of(newline) == b"\n"
    assert pieces.origin[newline] == BYTE_FALLBACK
    assert pieces.origin[tokenizer.convert_tokens_to_ids("▁")] == ORDINARY


def test_vocabulary_size_is_the_largest_id_plus_one() -> None:
    """Catches len(tokenizer), which is smaller where ids are missing; a missing id has no bytes."""
    vocab = {character: i for i, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    backend = Tokenizer(models.BPE(vocab | {"zz": 300}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_tokens(["<extra word>"])
    pieces = pieces_of(tokenizer)
    added = tokenizer.convert_tokens_to_ids("<extra word>")
    assert pieces.vocab_size == 1 + max(300, added)
    assert len(tokenizer) < pieces.vocab_size
    assert (pieces.origin[290], pieces.bytes_of(290)) == (HOLE, b"")
    assert (pieces.origin[added], pieces.bytes_of(added)) == (ADDED, b"<extra word>")
    with pytest.raises(AlignmentError, match=f"outside the vocabulary of size {pieces.vocab_size}"):
        pieces.bytes_of(pieces.vocab_size)


def test_built_once() -> None:
    assert pieces_of(byte_level()) is pieces_of(byte_level())


def test_padding_and_truncation_are_no_part_of_the_fingerprint() -> None:
    """Catches a cache that misses after the first padded batch."""
    tokenizer = byte_level(420, extra=("<pad>",))
    tokenizer.pad_token = "<pad>"
    before = fingerprint(tokenizer)
    tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=3)
    assert fingerprint(tokenizer) == before
    tokenizer.add_tokens(["<new>"])
    assert fingerprint(tokenizer) != before


def test_a_word_piece_tokenizer_is_refused() -> None:
    with pytest.raises(AlignmentError, match="WordPiece"):
        pieces_of(word_piece())


def test_word_end_suffixes_are_refused() -> None:
    backend = Tokenizer(models.BPE({"a</w>": 0}, [], end_of_word_suffix="</w>"))
    backend.decoder = decoders.BPEDecoder()
    with pytest.raises(AlignmentError, match="end_of_word_suffix"):
        pieces_of(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_a_decoder_that_does_not_spell_the_pieces_is_refused() -> None:
    """The round trip: the kind alone says byte level, but the decoder drops letters."""
    backend = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("fox", "cat")])
    with pytest.raises(AlignmentError, match=r"but it decodes them to .*cat"):
        pieces_of(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_a_tokenizer_without_a_backend_is_refused() -> None:
    class Slow:
        name_or_path = "slow"

    with pytest.raises(AlignmentError, match="no fast backend"):
        pieces_of(Slow())  # type: ignore[arg-type]
