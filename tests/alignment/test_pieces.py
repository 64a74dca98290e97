"""The bytes of each token id, compared with the tokenizer's own text, for each kind of vocabulary."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nemo_opd.alignment import fingerprint, pieces_of
from nemo_opd.alignment.pieces import ADDED, BYTE_FALLBACK, HOLE, ORDINARY, byte_level_bytes, read_backend
from nemo_opd.errors import AlignmentError
from tests.tokenizers_fixture import (
    REAL,
    byte_level,
    byte_level_with_prefix,
    corpus_texts,
    encode,
    llama_class,
    ranks,
    real_tokenizer,
    rebuilt,
    sentencepiece,
    t5_class,
    unigram,
    word_piece,
)


def meta_space_first(text: str) -> str:
    """Metaspace adds a space if the text does not begin with one; SentencePiece's own `▁` is a space too."""
    text = text.replace("▁", " ")
    return text if text[:1] in (" ", "") else " " + text


@dataclass(frozen=True)
class Family:
    make: Callable[[], PreTrainedTokenizerBase]
    split: Callable[[str], str] = str
    """The pre-tokenizer's change of a normalised text, written without tokenizers."""


FAMILIES = {
    "byte_level": Family(byte_level),
    "byte_level, NFC": Family(lambda: byte_level(500, nfc=True)),
    "byte_level, lower case": Family(lambda: rebuilt(byte_level(), normalizer=normalizers.Lowercase())),
    "byte_level, prefix": Family(byte_level_with_prefix, lambda t: t if t[:1] in (" ", "") else " " + t),
    "ranks": Family(ranks),
    "sentencepiece": Family(sentencepiece, lambda t: t.replace("▁", " ")),
    "sentencepiece, Prepend": Family(lambda: sentencepiece(dummy_prefix=True), lambda t: t.replace("▁", " ")),
    "sentencepiece, LlamaTokenizer": Family(llama_class, meta_space_first),
    "sentencepiece, LlamaTokenizer without prefix": Family(
        lambda: llama_class(dummy_prefix=False), lambda t: t.replace("▁", " ")
    ),
    "unigram, Precompiled": Family(lambda: unigram("first", "precompiled", byte_fallback=True), meta_space_first),
    "unigram, NFKC": Family(lambda: unigram("always", "nfkc", byte_fallback=True), meta_space_first),
    "unigram, lower case, never": Family(
        lambda: unigram("never", "lower", byte_fallback=True), lambda t: t.replace("▁", " ")
    ),
    "unigram without byte fallback": Family(unigram, meta_space_first),
    "unigram, T5Tokenizer": Family(t5_class, lambda t: "".join(" " + w for w in t.replace("▁", " ").split())),
}
HOSTILE = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from("eé\u0301\u0308\u200d\u200b\ufeff\ufffd\u00a0\u3000▁ \n\t\r\0"),
        st.sampled_from("ﬁＡ½ⅷ\U0001f469\U0001f3fd\U00010348가ᄀ\u1161İßΣ"),
        st.sampled_from("The quick brown 123 <0x0A> Ġ Ċ"),
    ),
    max_size=40,
)


@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_spell_the_text(name: str) -> None:
    """Bugs: a wrong byte alphabet, wrong fallback bytes, `▁` in pieces, a dummy prefix lost or counted twice."""
    family = FAMILIES[name]
    tokenizer = family.make()
    pieces = pieces_of(tokenizer)
    normalizer = tokenizer.backend_tokenizer.normalizer

    @settings(max_examples=80, database=None)
    @given(HOSTILE)
    @example("")
    @example("  The naïve 東京 👩‍👩‍👧‍👦\n\n\tfox ▁ \u0001 12345  ")
    @example("ﬁ Ａ e\u0301 ½\u3000x")
    def spells(text: str) -> None:
        ids = encode(tokenizer, text)
        if pieces.is_special[ids].any():
            return
        expected = family.split(normalizer.normalize_str(text) if normalizer else text)
        assert b"".join(map(pieces.bytes_of, ids)) == expected.encode()

    spells()


@pytest.mark.tokenizers
@pytest.mark.parametrize("name", REAL)
def test_real_pieces_spell_the_corpus(name: str) -> None:
    """Catches pieces that differ from the normalised document in any byte."""
    tokenizer = real_tokenizer(name)
    pieces = pieces_of(tokenizer)
    contents = pieces.as_list()
    normalizer = tokenizer.backend_tokenizer.normalizer
    texts = list(corpus_texts()[::3])
    for text, ids in zip(texts, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
        if pieces.is_special[ids].any():
            continue
        normal = normalizer.normalize_str(text) if normalizer else text
        expected = normal.replace("▁", " ") if name == "gemma3" else normal
        assert b"".join(contents[i] for i in ids) == expected.encode()


@pytest.mark.tokenizers
@pytest.mark.parametrize("name", REAL)
def test_every_real_piece_is_what_the_vocabulary_writes(name: str) -> None:
    """Catches a piece that differs from the model's spelling: `▁` and `<0xHH>`, or GPT-2's alphabet of bytes."""
    tokenizer = real_tokenizer(name)
    pieces = pieces_of(tokenizer)
    printable = {chr(b): b for b in range(256) if chr(b).isprintable() and b not in (0x20, 0xA0, 0xAD)}
    alphabet = printable | {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in printable.values())}
    for token, token_id in tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False).items():
        if pieces.is_special[token_id]:
            expected = b""
        elif name != "gemma3":
            expected = bytes(alphabet[character] for character in token)
        elif token.startswith("<0x"):
            expected = bytes.fromhex(token[3:5])
        else:
            expected = " ".join(token.split("▁")).encode()
        assert pieces.bytes_of(token_id) == expected


def test_runs_of_spaces_stored_in_normalised_form_are_spaces() -> None:
    """Bug: Gemma's added token `▁▁` counts as six bytes of U+2581."""
    tokenizer = sentencepiece()
    pieces = pieces_of(tokenizer)
    assert pieces.bytes_of(tokenizer.convert_tokens_to_ids("▁▁")) == b"  "
    outside_the_model = tokenizer.convert_tokens_to_ids("▁" * 7)
    assert (pieces.origin[outside_the_model], pieces.bytes_of(outside_the_model)) == (ADDED, b" " * 7)
    assert outside_the_model in encode(tokenizer, "a" + " " * 7 + "b")


def test_an_added_token_spells_what_the_normaliser_made_of_it() -> None:
    """Bug: the dummy prefix that an added token's content gets when it is added is missing."""
    tokenizer = copy.deepcopy(sentencepiece(dummy_prefix=True))
    tokenizer.add_tokens([AddedToken("<think>", normalized=True)])
    (token_id,) = set(encode(tokenizer, "a <think>b")) - set(encode(tokenizer, "ab"))
    assert pieces_of(tokenizer).bytes_of(token_id) == b" <think>"


@pytest.mark.parametrize("text", ["a <tool_call> b", "a<tool_call>b", "a  \n<tool_call>  b"])
def test_white_space_that_an_added_token_swallows_is_no_part_of_it(text: str) -> None:
    """Bug: white space that a token swallows is part of its bytes, although one id has one spelling."""
    tokenizer = ranks()
    pieces = pieces_of(tokenizer)
    assert pieces.bytes_of(tokenizer.convert_tokens_to_ids("<tool_call>")) == b"<tool_call>"
    assert b"".join(map(pieces.bytes_of, encode(tokenizer, text))) == b"a<tool_call>b"


def test_added_tokens_beyond_ascii() -> None:
    """Bug: `<é>` is read in the byte alphabet, as the backend's own decoder does."""
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.add_tokens(
        [AddedToken("<é>", normalized=False), AddedToken("<東 京>", normalized=False, single_word=True)]
    )
    pieces = pieces_of(tokenizer)
    text = "a <é> b <東 京> c"
    ids = encode(tokenizer, text)
    assert (pieces.origin[ids] == ADDED).sum() == 2
    assert b"".join(map(pieces.bytes_of, ids)) == text.encode()


def test_a_normaliser_that_writes_the_byte_alphabet() -> None:
    """Bug: `Ġ` in an added token is not a space, although added tokens are stored in the byte alphabet."""
    tokenizer = rebuilt(
        byte_level(), normalizer=normalizers.ByteLevel(), pre_tokenizer=pre_tokenizers.Split("", "removed")
    )
    tokenizer.add_tokens([AddedToken("<é x>", normalized=True), AddedToken("<ö x>", normalized=False)])
    text = "a b<é x>c<ö x>"
    pieces = pieces_of(tokenizer)
    ids = encode(tokenizer, text)
    assert (pieces.origin[ids] == ADDED).sum() == 2
    assert b"".join(map(pieces.bytes_of, ids)) == text.encode()


def test_an_added_token_under_a_lower_casing_normaliser_is_matched_in_lower_case() -> None:
    tokenizer = rebuilt(byte_level(), normalizer=normalizers.Lowercase())
    tokenizer.add_tokens([AddedToken("<Tool>", normalized=True), AddedToken("<RAW>", normalized=False)])
    ids = encode(tokenizer, "A<TOOL>b<RAW>c<raw>")
    pieces = pieces_of(tokenizer)
    assert (pieces.origin[ids] == ADDED).sum() == 2
    assert b"".join(map(pieces.bytes_of, ids)) == b"a<tool>b<RAW>c<raw>"


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
    """Bug: len(tokenizer) is used, which is smaller if ids are missing; a missing id has no bytes."""
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
    """Bug: a cache misses after the first padded batch."""
    tokenizer = byte_level(420, extra=("<pad>",))
    tokenizer.pad_token = "<pad>"
    original = fingerprint(tokenizer)
    tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=3)
    assert fingerprint(tokenizer) == original
    tokenizer.add_tokens(["<new>"])
    assert fingerprint(tokenizer) != original


def test_an_option_of_the_model_changes_the_fingerprint() -> None:
    """Bug: a changed tokenizer gets the cached pieces of the unchanged one."""
    tokenizer = byte_level(420)
    original = fingerprint(tokenizer)
    tokenizer.backend_tokenizer.model.ignore_merges = True
    assert fingerprint(tokenizer) != original


def test_a_word_piece_tokenizer_is_refused() -> None:
    with pytest.raises(AlignmentError, match="WordPiece"):
        pieces_of(word_piece())


def test_word_end_suffixes_are_refused() -> None:
    backend = Tokenizer(models.BPE({"a</w>": 0}, [], end_of_word_suffix="</w>"))
    backend.decoder = decoders.BPEDecoder()
    with pytest.raises(AlignmentError, match="end_of_word_suffix"):
        pieces_of(PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (decoders.Sequence([decoders.ByteLevel(), decoders.Replace("fox", "cat")]), "' fox'.*decodes it to .*cat"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Replace(Regex("[Q]"), "q")]), "stands for b'Q'"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Replace(Regex(r" (?=[.,!?])"), "")]), "decodes"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Replace(Regex(" n't"), "n't")]), "sequence of tokens|spell"),
        (decoders.Sequence([decoders.Strip(" ", 1, 1), decoders.Strip("Ġ", 1, 0), decoders.ByteLevel()]), "Ġ"),
        (decoders.Sequence([decoders.CTC(), decoders.ByteLevel()]), "decodes"),
        (decoders.Sequence([decoders.WordPiece(), decoders.ByteLevel()]), "decodes"),
        (decoders.CTC(), r"its decoder \(CTC\).*set backend_tokenizer.decoder"),
        (decoders.Fuse(), r"its decoder \(Fuse\)"),
        (decoders.Metaspace(replacement="_"), r"its decoder \(Metaspace\)"),
        (decoders.Metaspace(), "stands for|decodes"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value)[:50],
)
def test_a_decoder_that_does_not_spell_the_pieces_is_refused(decoder: decoders.Decoder, reason: str) -> None:
    """Bug: only the decoder's kind is checked, although it drops or changes text."""
    with pytest.raises(AlignmentError, match=rf"(?s)cannot be aligned by bytes: .*({reason})"):
        pieces_of(rebuilt(byte_level(), decoder=decoder))


def test_a_byte_that_decodes_to_another_is_found_wherever_it_is() -> None:
    """Bug: only sample texts are checked, and none has this character."""
    decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\x07", "\x08")])
    with pytest.raises(AlignmentError, match=r"stands for b'\\x07'"):
        pieces_of(rebuilt(byte_level(), decoder=decoder))


def test_a_pre_tokenizer_that_drops_white_space_is_refused() -> None:
    splitter = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(False)])
    with pytest.raises(AlignmentError, match="drops the white space"):
        pieces_of(rebuilt(byte_level(), pre_tokenizer=splitter))


def test_merges_are_read_whatever_the_pieces_hold() -> None:
    """Bug: the serialised model is cut at a piece that looks like one of its keys."""
    piece = '"merges":['
    letters = sorted(set(piece))
    vocab = {letter: i for i, letter in enumerate(letters)} | {'"m': 90, piece: 91, 'x"merges': 92}
    tokenizer = rebuilt(byte_level(), model=models.BPE(vocab, [('"', "m")]), decoder=decoders.ByteLevel())
    backend = read_backend(tokenizer)
    assert backend.merges == (('"', "m"),)
    assert backend.vocab == vocab
    assert read_backend(unigram()).merges == ()
    trained = read_backend(byte_level())
    assert all(first + second in trained.vocab for first, second in trained.merges)


def test_byte_alphabet_or_text() -> None:
    assert byte_level_bytes("Ġaé") == b" a\xe9"
    assert byte_level_bytes("Ġ é") == "Ġ é".encode()
    assert byte_level_bytes("東") == "東".encode()
    assert byte_level_bytes("\uffff") == "\uffff".encode()


def test_a_tokenizer_without_a_backend_is_refused() -> None:
    class Slow:
        name_or_path = "slow"

    with pytest.raises(AlignmentError, match="no fast backend"):
        pieces_of(Slow())  # type: ignore[arg-type]
