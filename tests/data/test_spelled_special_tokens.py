"""Texts that spell special tokens: rendered conversations, and documents with `<s>` in them."""

from typing import Any

import pytest
from tokenizers import processors

from nemo_opd.data.encoders import Encoder, encode_beginning
from nemo_opd.data.text import TextContinuation
from tests.tokenizers_fixture import byte_level, rebuilt, sentencepiece


def with_ends(single: str, make: Any = byte_level) -> Any:
    """Return a tokenizer that puts its BOS and EOS around a text as in `single`."""
    tokenizer = sentencepiece() if make is sentencepiece else byte_level(extra=("<bos>",))
    names = (tokenizer.bos_token or "<bos>", tokenizer.eos_token)
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in names]
    single = single.replace("BOS", names[0]).replace("EOS", names[1])
    rebuilt_tokenizer = rebuilt(
        tokenizer, post_processor=processors.TemplateProcessing(single=single, special_tokens=ids)
    )
    rebuilt_tokenizer.bos_token, rebuilt_tokenizer.eos_token = names
    return rebuilt_tokenizer


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("single", ["$A", "BOS $A", "BOS $A EOS", "$A EOS"])
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("ends", ["", "EOS", "EOS\n"])
def test_a_text_that_spells_its_ends_has_them_once(make: Any, single: str, begins: bool, ends: str) -> None:
    """Bug: a rendered conversation began with two BOS, and had an EOS after the end of its last turn."""
    tokenizer = with_ends(single, make)
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    text = bos * begins + "The fox sleeps" + ends.replace("EOS", eos)
    encoder = Encoder.of(tokenizer, 64, append_eos=True)
    encoding = encoder(text)
    tokens = tokenizer.convert_ids_to_tokens(encoding.ids)
    assert tokens.count(bos) == int(begins or "BOS" in single)
    assert tokens.count(eos) == 1
    located, starts = encoder.located(text)
    assert located.ids.tolist() == encoding.ids.tolist()
    assert len(starts) == len(located.ids)
    assert (starts[1:] >= starts[:-1]).all()
    long = text + " The fox sleeps." * 500
    (beginning,) = encode_beginning(encoder, [], long, 8)
    assert beginning.ids[:8].tolist() == encoder(long).ids[:8].tolist()
    continued = TextContinuation(tokenizer)(text[:9], text[9:], is_ended=not ends.endswith("\n"))
    of_turn = tokenizer.convert_ids_to_tokens(continued.ids)
    assert of_turn.count(bos) == int(begins or "BOS" in single)
    assert of_turn.count(eos) == 1


def test_an_inner_special_token_stays() -> None:
    tokenizer = with_ends("BOS $A EOS")
    tokens = tokenizer.convert_ids_to_tokens(Encoder.of(tokenizer, 64, append_eos=True)("a<bos>b<|eot_id|>c").ids)
    assert tokens == ["<bos>", "a", "<bos>", "b", "<|eot_id|>", "c", "<|eot_id|>"]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_special_tokens_as_text(make: Any) -> None:
    """Catches `<s>` in a document read as BOS, and marks of a template that are split afterwards."""
    tokenizer = with_ends("BOS $A", make)
    text = f"{tokenizer.bos_token}30{tokenizer.eos_token} now{tokenizer.eos_token}"
    encoder = Encoder.of(tokenizer, 64, append_eos=True, reads_special=False)
    encoding = encoder(text)
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    assert [i in special for i in encoding.ids] == [True, *[False] * (len(encoding.ids) - 2), True]
    assert b"".join(map(encoder.pieces.bytes_of, encoding.ids.tolist())).decode() == text
    assert special <= set(tokenizer(text)["input_ids"][1:])
    assert encoder.identity != Encoder.of(tokenizer, 64, append_eos=True).identity
