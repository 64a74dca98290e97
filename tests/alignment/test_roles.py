"""Roles: read from names, contents, templates and generation configs, and paired between tokenizers."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nemo_opd.alignment import pieces_of
from nemo_opd.alignment.roles import RolePair, SpecialTokens, pair_special_tokens, paired_roles
from nemo_opd.alignment.token_roles import is_reserved, role_table, roles_of
from nemo_opd.errors import AlignmentError
from tests.tokenizers_fixture import REAL, byte_level, ranks, real_tokenizer, rebuilt, sentencepiece

INSTRUCT = {"llama3_1": "<|eot_id|>", "qwen3": "<|im_end|>", "gemma3": "<end_of_turn>"}
BASE = {"llama3_1": "<|end_of_text|>", "qwen3": "<|endoftext|>", "gemma3": "<eos>"}


def with_specials(*contents: str, eos: str = "<|x|>", marks: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Return a new small tokenizer, since a test's changes stay in it."""
    tokenizer = rebuilt(byte_level(400, eos="<|x|>", extra=()))
    tokenizer.add_special_tokens({"additional_special_tokens": list(contents)})
    tokenizer.add_tokens(list(marks))
    tokenizer.eos_token = eos
    return tokenizer


def roles(tokenizer: PreTrainedTokenizerBase, content: str) -> tuple[str, ...]:
    return roles_of(tokenizer).get(tokenizer.convert_tokens_to_ids(content), ())


cached_pieces = cache(pieces_of)
"""Saves serialising large vocabularies again; no test adds tokens after a call."""


def paired(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> SpecialTokens:
    return pair_special_tokens(student, teacher, cached_pieces(student), cached_pieces(teacher))


def contents(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the contents of the one-to-one pairs."""
    return {
        student.convert_ids_to_tokens(s): teacher.convert_ids_to_tokens(t) for s, t in paired(student, teacher).pairs
    }


@contextmanager
def as_base(name: str) -> Iterator[PreTrainedTokenizerBase]:
    """Yield the tokenizer with a base model's eos, which ends a text."""
    tokenizer = real_tokenizer(name)
    tokenizer.eos_token = BASE[name]
    try:
        yield tokenizer
    finally:
        tokenizer.eos_token = INSTRUCT[name]


@pytest.mark.tokenizers
@pytest.mark.parametrize(("student", "teacher"), list(permutations(INSTRUCT, 2)))
def test_ends_of_turns_and_of_texts_pair_in_every_ordered_pair(student: str, teacher: str) -> None:
    """Bugs: tokens are paired by spelling; an end of text takes the partner of an end of turn."""
    pairs = contents(real_tokenizer(student), real_tokenizer(teacher))
    assert pairs[INSTRUCT[student]] == INSTRUCT[teacher]
    assert pairs[BASE[student]] == BASE[teacher]


@pytest.mark.tokenizers
@pytest.mark.parametrize(("student", "teacher"), list(permutations(INSTRUCT, 2)))
def test_a_base_model_against_an_instructed_one(student: str, teacher: str) -> None:
    """Bug: eos is paired with eos whatever it ends, so the teacher's end of text has no partner."""
    for base in (student, teacher):
        ours, theirs = real_tokenizer(student), real_tokenizer(teacher)
        with as_base(base):
            pairs = contents(ours, theirs)
            assert pairs[INSTRUCT[student]] == INSTRUCT[teacher]
            assert pairs[BASE[student]] == BASE[teacher]
            special = paired(ours, theirs)
            s_class, t_class = special.student_class[ours.eos_token_id], special.teacher_class[theirs.eos_token_id]
            assert special.matches[s_class, t_class], "the two ends of a document pair"


@pytest.mark.tokenizers
@pytest.mark.parametrize("name", INSTRUCT)
def test_the_only_end_of_a_tokenizer_pairs_with_the_eos_of_the_other(name: str) -> None:
    """Bug: the only end of gpt4o is not paired one to one with the other tokenizer's eos in both directions."""
    tokenizer, gpt4o = real_tokenizer(name), real_tokenizer("gpt4o")
    assert contents(tokenizer, gpt4o)[tokenizer.eos_token] == "<|endoftext|>"
    assert contents(gpt4o, tokenizer) == {"<|endoftext|>": tokenizer.eos_token}
    assert paired(tokenizer, gpt4o).best[tokenizer.convert_tokens_to_ids(BASE[name])] == gpt4o.eos_token_id


@pytest.mark.tokenizers
def test_beginnings_and_headers_pair() -> None:
    llama, gemma, qwen = map(real_tokenizer, ("llama3_1", "gemma3", "qwen3"))
    assert contents(llama, gemma)["<|begin_of_text|>"] == "<bos>"
    assert contents(gemma, llama)["<bos>"] == "<|begin_of_text|>"
    assert contents(llama, qwen)["<|start_header_id|>"] == "<|im_start|>"
    assert contents(gemma, qwen)["<start_of_turn>"] == "<|im_start|>"


@pytest.mark.tokenizers
@pytest.mark.parametrize(("student", "teacher"), [(a, b) for a, b in product(REAL, REAL) if a != b])
def test_no_special_token_pairs_with_text(student: str, teacher: str) -> None:
    """Bug: a special token pairs with text. Both must be without bytes, or added tokens for the same mark."""
    tokenizers = real_tokenizer(student), real_tokenizer(teacher)
    pieces = [pieces_of(tokenizer) for tokenizer in tokenizers]
    table = [roles_of(tokenizer) for tokenizer in tokenizers]
    special = paired(*tokenizers)
    s_ids, t_ids = np.flatnonzero(special.student_class >= 0), np.flatnonzero(special.teacher_class >= 0)
    joined = [
        (s, t)
        for s in s_ids.tolist()
        for t in t_ids.tolist()
        if special.matches[special.student_class[s], special.teacher_class[t]]
    ]
    assert set(special.pairs) | set(special.best.items()) <= set(joined)
    assert joined
    for s, t in joined:
        shared = set(table[0][s]) & set(table[1][t])
        without_bytes = pieces[0].is_special[s] and pieces[1].is_special[t]
        assert without_bytes or shared & {"think_start", "think_end", "tool_call_start", "tool_call_end"}


@pytest.mark.tokenizers
@pytest.mark.parametrize("name", REAL)
def test_a_tokenizer_paired_with_itself_is_the_identity(name: str) -> None:
    """Bug: reserved tokens are unpaired, so the loss differs from the same-vocabulary loss."""
    tokenizer = real_tokenizer(name)
    special = paired(tokenizer, tokenizer)
    assert all(s == t for s, t in special.pairs)
    assert {s for s, _ in special.pairs} == set(roles_of(tokenizer))


@pytest.mark.tokenizers
def test_reserved_tokens_pair_with_nothing_of_another_tokenizer() -> None:
    """Bug: `<unused0>` of two models is paired by its name, although its meanings differ."""
    ours, theirs = with_specials("<unused0>", "<|image|>"), with_specials("<|eot_id|>", "<unused0>", "<|image|>")
    assert contents(ours, theirs) == {"<|x|>": "<|x|>", "<|image|>": "<|image|>"}
    assert contents(ours, ours)["<unused0>"] == "<unused0>"
    rows = paired_roles(ours, theirs, {"<unused0>": "tool"})
    assert RolePair("tool", "<unused0>", "<unused0>", True) in rows
    llama = real_tokenizer("llama3_1")
    assert not any("reserved" in content for content in contents(llama, ranks()))


@pytest.mark.parametrize(
    "content",
    [
        *("<|reserved_special_token_0|>", "<unused99>", "[unused1]", "<|extra_0|>", "<extra_id_7>", "<|dummy_12|>"),
        *("<|placeholder1|>", "<SPECIAL_12>", "[control_8]", "<|reserved_200000|>", "<｜place▁holder▁no▁3｜>"),
    ],
)
def test_reserved_names(content: str) -> None:
    assert is_reserved(content)


@pytest.mark.parametrize(
    "content", ["<|im_end|>", "<|special|>", "<image_1>", "<s>", "<0x0A>", "<|fim_prefix|>", "[THINK]"]
)
def test_names_of_tokens_in_use(content: str) -> None:
    assert not is_reserved(content)


def test_the_end_of_a_message_is_the_end_of_a_turn_where_nothing_is_nearer() -> None:
    llama = with_specials("<|eom_id|>", "<|eot_id|>", "<|python_tag|>", eos="<|eot_id|>")
    assert roles(llama, "<|eom_id|>") == ("end_of_message", "end_of_turn")
    assert roles(llama, "<|python_tag|>") == ("python_tag",)
    qwen, llama4 = with_specials("<|im_end|>", eos="<|im_end|>"), with_specials("<|eot|>", "<|eom|>", eos="<|eot|>")
    assert contents(llama, qwen)["<|eot_id|>"] == "<|im_end|>"
    assert paired(llama, qwen).best[llama.convert_tokens_to_ids("<|eom_id|>")] == qwen.eos_token_id
    assert contents(llama, llama4)["<|eom_id|>"] == "<|eom|>"
    assert contents(qwen, llama)["<|im_end|>"] == "<|eot_id|>"


def test_of_several_ends_of_a_turn_the_one_that_is_eos_is_nearer_to_eos() -> None:
    """Bug: gpt-oss's `<|end|>` of messages, which has the lower id, is paired and not its `<|return|>` of answers."""
    harmony = with_specials("<|end|>", "<|return|>", "<|endoftext|>", eos="<|return|>")
    qwen = with_specials("<|endoftext|>", "<|im_end|>", eos="<|im_end|>")
    expected = {"<|im_end|>": "<|return|>", "<|endoftext|>": "<|endoftext|>", "<|x|>": "<|x|>"}
    assert contents(qwen, harmony) == expected
    assert contents(harmony, qwen) == {theirs: ours for ours, theirs in expected.items()}
    two_ends = with_specials("<|eot_id|>", "<|im_end|>", eos="<|eot_id|>")
    assert contents(harmony, two_ends)["<|return|>"] == "<|eot_id|>"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("<think>", "[THINK]"),
        ("</tool_call>", "<｜tool▁call▁end｜>"),
        ("<tool_response>", "[TOOL_RESULTS]"),
        ("<|user|>", "<｜User｜>"),
        ("<|im_assistant|>", "<|assistant|>"),
        ("<|fim_suffix|>", "<｜fim▁hole｜>"),
        ("<|end_header_id|>", "<|message|>"),
        ("<|im_sep|>", "<|im_middle|>"),
        ("<turn|>", "<|return|>"),
        ("<|channel>", "<|channel|>"),
    ],
)
def test_marks_of_different_families_pair(ours: str, theirs: str) -> None:
    student, teacher = with_specials(ours, eos="<|x|>"), with_specials("<|y|>", theirs)
    assert contents(student, teacher)[ours] == theirs


@pytest.mark.tokenizers
def test_marks_are_marks_whether_special_or_not_and_other_text_is_none() -> None:
    """Bug: Gemma's added token `</s>`, an HTML tag, pairs with another tokenizer's end of text."""
    tokenizer = with_specials("[THINK]", marks=("<think>", "</s>", "<|im_end|>"))
    assert roles(tokenizer, "<think>") == roles(tokenizer, "[THINK]") == ("think_start",)
    assert roles(tokenizer, "</s>") == roles(tokenizer, "<|im_end|>") == ()
    gemma = real_tokenizer("gemma3")
    assert gemma.convert_tokens_to_ids("</s>") not in roles_of(gemma)


def test_eos_stays_eos_where_pad_is_the_same_token() -> None:
    tokenizer = byte_level(430, extra=("<|x|>",))
    tokenizer.pad_token = tokenizer.eos_token
    assert roles_of(tokenizer)[tokenizer.eos_token_id] == ("eos", "end_of_turn")


@pytest.mark.tokenizers
def test_names_of_images_keep_their_content() -> None:
    gemma = real_tokenizer("gemma3")
    assert gemma.special_tokens_map["image_token"] == "<image_soft_token>"
    assert roles(gemma, "<image_soft_token>") == ("<image_soft_token>",)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{% for m in messages %}{{ '<|a|>' + m.role + '<|b|>' + m.content + '<|z|>\\n' }}{% endfor %}",
            {"<|a|>": "start_of_turn", "<|b|>": "end_of_header", "<|z|>": "end_of_turn"},
        ),
        (
            "{% for m in messages %}{{ '<|a|>' + m.role + '\\n' + m.content + '<|z|>' }}{% endfor %}",
            {"<|a|>": "start_of_turn", "<|z|>": "end_of_turn"},
        ),
        (
            "{% for m in messages %}{{ ('<|a|>' if m.role == 'user' else '<|b|>') + m.content }}{% endfor %}",
            {},
        ),
        ("{% for m in messages %}{{ m.content + '<|z|>' }}{% endfor %}", {"<|z|>": "end_of_turn"}),
        ("{{ raise_exception('no') }}", {}),
        ("{{ messages[0]['content'] }} {% broken", {}),
    ],
)
def test_the_chat_template_tells_what_unknown_tokens_mean(template: str, expected: dict[str, str]) -> None:
    """Bug: tokens that start one speaker's turns (`<|a|>` a user's, `<|b|>` an assistant's) count as starts of any."""
    tokenizer = with_specials("<|a|>", "<|b|>", "<|z|>")
    tokenizer.chat_template = template
    token_roles = {content: roles(tokenizer, content) for content in ("<|a|>", "<|b|>", "<|z|>")}
    assert token_roles == {content: (expected.get(content, content),) for content in token_roles}


@pytest.mark.parametrize("template", ["{{ m.content + '<|x|>' }}{% broken", "{{ eos_token }}{{ raise_exception('') }}"])
def test_a_template_that_names_eos_ends_its_turns_with_it(template: str) -> None:
    tokenizer = with_specials()
    assert roles(tokenizer, "<|x|>") == ("eos",)
    tokenizer.chat_template = template
    assert roles(tokenizer, "<|x|>") == ("eos", "end_of_turn")


def beside(tmp_path: Path, content: object) -> PreTrainedTokenizerFast:
    """Return a tokenizer loaded from a folder with this generation config."""
    tokenizer = with_specials("<|end_of_text|>", "<|stop|>", "<|blank|>", "<|start|>", marks=("</s>",))
    tokenizer.save_pretrained(tmp_path)
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "generation_config.json").write_text(text)
    return PreTrainedTokenizerFast.from_pretrained(tmp_path)


def test_the_generation_config_names_ends(tmp_path: Path) -> None:
    """Bugs: only one id of the list is an end; a token's own content does not come first; text becomes special."""
    ids = {token.content: i for i, token in beside(tmp_path, {}).added_tokens_decoder.items()}
    tokenizer = beside(
        tmp_path,
        {
            "eos_token_id": [ids["<|end_of_text|>"], ids["<|stop|>"], ids["</s>"], 5, 10**9],
            "pad_token_id": ids["<|blank|>"],
            "bos_token_id": ids["<|start|>"],
        },
    )
    assert roles(tokenizer, "<|end_of_text|>") == ("end_of_text", "eos")
    assert roles(tokenizer, "<|stop|>") == ("eos",)
    assert roles(tokenizer, "<|blank|>") == ("pad",)
    assert roles(tokenizer, "<|start|>") == ("start_of_turn", "bos")
    assert roles(tokenizer, "</s>") == ()
    assert 5 not in roles_of(tokenizer)


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "a"}', '{"eos_token_id": [1, null]}', "\x00", '"a"'])
def test_a_broken_generation_config_is_ignored_with_a_warning(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = beside(tmp_path, content)
    with caplog.at_level(logging.WARNING):
        assert roles(tokenizer, "<|stop|>") == ("<|stop|>",)
        roles_of(tokenizer)
    assert [str(tmp_path) in record.getMessage() for record in caplog.records] == [True]


def test_a_hub_model_has_the_generation_config_of_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the generation config in the hub's cache is not read."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    tokenizer = with_specials("<|stop|>")
    tokenizer.name_or_path = "somebody/model"
    assert roles(tokenizer, "<|stop|>") == ("<|stop|>",)
    folder = tmp_path / "models--somebody--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    config = {"eos_token_id": tokenizer.convert_tokens_to_ids("<|stop|>")}
    (folder / "snapshots" / "abc" / "generation_config.json").write_text(json.dumps(config))
    assert roles(tokenizer, "<|stop|>") == ("eos",)
    tokenizer.name_or_path = "no//such name"
    assert roles(tokenizer, "<|stop|>") == ("<|stop|>",)


def test_the_table_lists_every_role_by_id() -> None:
    tokenizer = ranks()
    rows = role_table(tokenizer, {"<think>": ["a", "b"]})
    assert [row.id for row in rows] == sorted(row.id for row in rows)
    assert {row.id: row.roles for row in rows} == roles_of(tokenizer, {"<think>": ["a", "b"]})
    by_content = {row.content: row for row in rows}
    assert by_content["<think>"].roles == ("a", "b")
    assert by_content["<|python_tag|>"].roles == ("python_tag",)
    assert [row.content for row in rows if row.reserved] == ["<|reserved_special_token_0|>"]


@pytest.mark.tokenizers
def test_the_listing_of_a_pair_says_what_it_lacks() -> None:
    rows = paired_roles(real_tokenizer("qwen3"), real_tokenizer("gpt4o"))
    by_content = {row.student: row for row in rows}
    assert by_content["<|im_end|>"] == RolePair("eos", "<|im_end|>", "<|endoftext|>", True)
    assert by_content["<|endoftext|>"] == RolePair("end_of_text", "<|endoftext|>", "<|endoftext|>", False)
    assert by_content["<think>"] == RolePair("think_start", "<think>", None, False)
    assert paired_roles(sentencepiece(), byte_level(), {"<bos>": ()}) == [
        row for row in paired_roles(sentencepiece(), byte_level()) if row.student != "<bos>"
    ]
    with pytest.raises(AlignmentError, match="<nowhere>"):
        paired_roles(sentencepiece(), byte_level(), {"<nowhere>": "x"})
