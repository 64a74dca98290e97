"""Rollouts as samples: sampled ids stay, and each teacher reads the same text."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_opd.alignment import TokenAligner, pieces_of
from nemo_opd.config.rollout import CalculatorEnvironment
from nemo_opd.data.encoders import ChatEncoder, CrossTokenizer
from nemo_opd.data.rollouts import CrossTokenizerText, RolloutSampleMaker
from nemo_opd.data.row_types import Prompt, Rollout
from nemo_opd.data.samples import SameTokenizer, Sample, Tokens
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.rollout.collect import Collector, dataset_rollout
from nemo_opd.rollout.conversation import ConversationRenderer
from nemo_opd.rollout.engine_interface import Sampling
from nemo_opd.rollout.environment import build_environment
from nemo_opd.rollout.renderer import TextRenderer
from tests.alignment.chat_fixture import with_template
from tests.rollout.scripted import Scripted, asking, encoded, speaking
from tests.rollout.templates import TAGGED, talking
from tests.tokenizers_fixture import DIGITS_ONE_BY_ONE, byte_level, real_tokenizer, sentencepiece

STUDENT = byte_level(610)
TEACHER = byte_level(455, DIGITS_ONE_BY_ONE, "<|im_end|>", ("<|endoftext|>",))
PIECES = pieces_of(STUDENT)
TEXT_CHARACTERS = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=30)


def collected(ids: list[int], finish_reason: Any, prompt: str = "The quick") -> Rollout:
    engine = Scripted(lambda request: (ids, finish_reason))
    collector = Collector(
        engine, TextRenderer(STUDENT), sampling=Sampling(), max_new_tokens=500, max_length=999, seed=0
    )
    return collector.collect([Prompt(6, prompt)], 1, 0)[0]


def text_maker(teacher: Any = TEACHER, max_length: int = 999) -> RolloutSampleMaker:
    cross = CrossTokenizerText.of(teacher, max_length, TokenAligner(STUDENT, teacher))
    return RolloutSampleMaker(PIECES.lengths, (cross, SameTokenizer()))


def learned(tokenizer: Any, tokens: Tokens) -> str:
    """Decode the tokens with a loss, including special tokens."""
    return tokenizer.decode(tokens.ids[tokens.loss_mask])


def shuffled_tokens(text: str, seed: int) -> list[int]:
    """Return random ids that spell the text; cuts may lie within a character."""
    data, random = text.encode(), np.random.default_rng(seed)
    by_bytes = {piece: i for i, piece in enumerate(PIECES.as_list()) if piece}
    ids, start = [], 0
    while start < len(data):
        lengths = [n for n in range(1, 9) if data[start : start + n] in by_bytes and start + n <= len(data)]
        length = int(random.choice(lengths))
        ids.append(by_bytes[data[start : start + length]])
        start += length
    return ids


@given(TEXT_CHARACTERS, st.integers(0, 2**32), st.sampled_from(["stop", "length"]))
@settings(max_examples=60)
def test_every_sampled_token_lies_in_a_chunk(text: str, seed: int, finish_reason: str) -> None:
    """Catches sampled tokens without a chunk, the end included, for two byte-level tokenizers and valid UTF-8.

    The prompt ends with a digit, which the teacher's tokenizer does not merge with the response.
    """
    ids = shuffled_tokens(text, seed) + [STUDENT.eos_token_id] * (finish_reason == "stop")
    if not ids:
        return
    sample = text_maker()(collected(ids, finish_reason, prompt="Fox 1"))
    tokens = sample.teachers[0].tokens
    assert sample.student.ids.tolist() == [*encoded(STUDENT, "Fox 1"), *ids]
    assert sample.student.loss_mask.tolist() == [False] * len(encoded(STUDENT, "Fox 1")) + [True] * len(ids)
    assert learned(TEACHER, tokens) == text + "<|im_end|>" * (finish_reason == "stop")
    ours, theirs = aligned(sample)
    assert (ours == sample.student.loss_mask).all()
    assert (theirs == tokens.loss_mask).all()


def test_a_teachers_token_across_the_prompts_end_is_not_learned() -> None:
    assert len(encoded(TEACHER, "The")) == 1
    sample = text_maker()(collected([*encoded(STUDENT, "e"), *encoded(STUDENT, " fox")], "length", prompt="Th"))
    ours, theirs = aligned(sample)
    assert learned(TEACHER, sample.teachers[0].tokens) == " fox"
    assert STUDENT.decode(sample.student.ids[ours]) == TEACHER.decode(sample.teachers[0].tokens.ids[theirs]) == " fox"


@given(st.lists(st.integers(0, PIECES.vocab_size - 1), min_size=1, max_size=25))
@settings(max_examples=60)
def test_any_sampled_ids_are_a_sample(ids: list[int]) -> None:
    """Catches invalid UTF-8 and special tokens that break samples, and chunks with different bytes on the two sides."""
    for teacher in (TEACHER, sentencepiece()):
        sample = text_maker(teacher)(collected(ids, "length"))
        tokens, chunks = sample.teachers[0].tokens, sample.teachers[0].chunks
        assert chunks is not None
        for chunk in set(chunks.student.tolist()) - {-1}:
            ours = b"".join(map(PIECES.bytes_of, sample.student.ids[chunks.student == chunk].tolist()))
            theirs = b"".join(map(pieces_of(teacher).bytes_of, tokens.ids[chunks.teacher == chunk].tolist()))
            assert ours == theirs


def test_the_same_tokenizer_reads_the_same() -> None:
    sample = text_maker()(collected([*encoded(STUDENT, " brown"), STUDENT.eos_token_id], "stop"))
    assert sample.teachers[1].tokens is sample.student
    assert sample.student.num_bytes.tolist() == PIECES.lengths[sample.student.ids].tolist()


def test_a_teacher_reads_no_more_than_it_may() -> None:
    rollout = collected(encoded(STUDENT, " brown fox jumps over 123 dogs"), "length")
    uncut, cut = text_maker()(rollout).teachers[0], text_maker(max_length=9)(rollout).teachers[0]
    assert cut.tokens.ids.tolist() == uncut.tokens.ids[:9].tolist()
    assert cut.chunks is not None
    assert uncut.chunks is not None
    assert cut.chunks.teacher.max() <= uncut.chunks.teacher.max()
    gone = set(uncut.chunks.teacher[9:].tolist())
    expected = np.where(np.isin(uncut.chunks.student, list(gone)), -1, uncut.chunks.student)
    assert cut.chunks.student.tolist() == expected.tolist()


def test_a_token_that_a_teacher_cannot_read_is_refused() -> None:
    cross = CrossTokenizerText.of(TEACHER, 99, TokenAligner(STUDENT, TEACHER), vocab_size=300)
    with pytest.raises(DataError, match="no embedding"):
        RolloutSampleMaker(PIECES.lengths, (cross,))(collected(encoded(STUDENT, " the"), "length"))


ROLES = """{% for m in messages %}<|endoftext|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|endoftext|>assistant
{% endif %}"""
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'
EARLIER = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, 東京"}]


def conversation(tokenizer: Any, *turns: str, finish_reason: Any = "stop") -> Rollout:
    engine = speaking(tokenizer, tokenizer.eos_token_id, *turns)
    if finish_reason == "length":
        engine = Scripted(lambda request: (encoded(tokenizer, turns[0]), "length"))
    collector = Collector(
        engine,
        ConversationRenderer(tokenizer),
        sampling=Sampling(),
        max_new_tokens=99,
        max_length=999,
        environment=build_environment(CalculatorEnvironment(max_turns=3)),
    )
    messages = [*EARLIER, {"role": "user", "content": "6 * 7?"}]
    return collector.collect([Prompt(6, messages, answer="42")], 1, 0)[0]


def chat_maker(student: Any, teacher: Any) -> RolloutSampleMaker:
    cross = CrossTokenizer(ChatEncoder.of(teacher, 999, {}), TokenAligner(student, teacher))
    return RolloutSampleMaker(pieces_of(student).lengths, (cross,))


def aligned(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    chunks = sample.teachers[0].chunks
    assert chunks is not None
    return chunks.student >= 0, chunks.teacher >= 0


def test_a_teachers_template_around_the_students_turns() -> None:
    """Catches a loss on the prompt's assistant message, and turns without their end tokens."""
    student, teacher = talking("tagged"), with_template(TEACHER, ROLES)
    rollout = conversation(student, f"I ask. {CALL}", "It is 42.")
    assert (len(rollout.turns), rollout.env_reward) == (2, 1.0)
    sample = chat_maker(student, teacher)(rollout)
    tokens = sample.teachers[0].tokens
    assert learned(student, sample.student) == f"I ask. {CALL}<|im_end|>It is 42.<|im_end|>"
    assert learned(teacher, tokens) == f"I ask. {CALL}<|im_end|>It is 42.<|im_end|>"
    ours, theirs = aligned(sample)
    assert (ours == sample.student.loss_mask).all()
    assert (theirs == tokens.loss_mask).all()
    rendered = teacher.apply_chat_template(list(rollout.messages), tokenize=False)
    assert teacher.decode(tokens.ids) == rendered.rstrip("\n")


def test_a_turn_that_was_cut_has_no_end() -> None:
    student, teacher = talking("tagged"), with_template(TEACHER, ROLES)
    sample = chat_maker(student, teacher)(conversation(student, "It is 4", finish_reason="length"))
    assert learned(student, sample.student) == "It is 4"
    assert learned(teacher, sample.teachers[0].tokens) == "It is 4"
    assert sample.teachers[0].tokens.loss_mask[-1]


@pytest.mark.tokenizers
def test_a_teacher_whose_template_takes_thinking_apart() -> None:
    """Catches sampled ids that change because Qwen's template trims thinking and writes its tags again."""
    student, teacher = real_tokenizer("llama3_1"), real_tokenizer("qwen3")
    engine = speaking(student, student.eos_token_id, "<think>\nhm\n</think>\n\nIt is 42.")
    collector = Collector(engine, ConversationRenderer(student), sampling=Sampling(), max_new_tokens=99, max_length=999)
    (rollout,) = collector.collect([asking("6 * 7?")], 1, 0)
    sample = chat_maker(student, teacher)(rollout)
    ours, theirs = aligned(sample)
    end = teacher.convert_ids_to_tokens(teacher.eos_token_id)
    assert learned(teacher, sample.teachers[0].tokens) == f"<think>\nhm\n</think>\n\nIt is 42.{end}"
    assert (ours == sample.student.loss_mask).all()
    assert (theirs == sample.teachers[0].tokens.loss_mask).all()


def test_a_prompt_that_the_teachers_template_changes_is_not_compared_behind() -> None:
    """Catches a changed prompt that goes unnoticed: rollouts have no content spans of their prompts to compare."""
    student = talking("tagged")
    turns = f"I ask. {CALL}", "It is 42."
    plain = chat_maker(student, with_template(TEACHER, ROLES))(conversation(student, *turns)).teachers[0].chunks
    dropping = ROLES.replace("{{ m.content }}", "{{ m.content if loop.index != 2 else 'Hello' }}")
    changed = chat_maker(student, with_template(TEACHER, dropping))(conversation(student, *turns)).teachers[0].chunks
    assert plain is not None
    assert changed is not None
    assert plain.histories[0] == changed.histories[0] == changed.histories[1] > 0
    assert plain.histories[1] == 0
    assert plain.compared[0].tolist() == plain.student.tolist()
    assert (changed.compared[0] < 0).all()
    assert (changed.compared[1] < 0).all()


def test_nothing_said_but_the_end() -> None:
    student, teacher = talking("tagged"), with_template(TEACHER, ROLES)
    sample = chat_maker(student, teacher)(conversation(student, ""))
    assert learned(student, sample.student) == learned(teacher, sample.teachers[0].tokens) == "<|im_end|>"
    assert aligned(sample)[0].sum() == 1


def test_a_template_that_refuses_names_the_prompt() -> None:
    student = talking("tagged")
    teacher = with_template(TEACHER, TAGGED.replace("# system", "# s") + "{{ raise_exception('not me') }}")
    rollout = conversation(student, "It is 42.")
    with pytest.raises(AlignmentError, match=r"prompt 6 \(row\), sample 0: .*not me"):
        chat_maker(student, teacher)(rollout)


def test_a_dataset_text_is_made_the_same_way() -> None:
    """Catches non-canonical tokens of prompt and response, and an EOS behind a cut one."""
    prompt = Prompt(6, "The quick", response=" brown fox 123")
    renderer = TextRenderer(STUDENT)
    rollout = dataset_rollout(prompt, renderer, 999)
    assert rollout.ids.tolist() == [*encoded(STUDENT, "The quick brown fox 123"), STUDENT.eos_token_id]
    assert (rollout.version, rollout.finish_reason, rollout.responses) == (-1, "stop", (" brown fox 123",))
    assert not rollout.logprobs.any()
    sample = text_maker()(rollout)
    assert learned(TEACHER, sample.teachers[0].tokens) == " brown fox 123<|im_end|>"
    assert (aligned(sample)[0] == sample.student.loss_mask).all()
    cut = dataset_rollout(prompt, renderer, len(rollout.ids) - 1)
    assert (cut.finish_reason, cut.ids.tolist()) == ("length", rollout.ids[:-1].tolist())
    assert learned(TEACHER, text_maker()(cut).teachers[0].tokens) == " brown fox 123"


def test_a_dataset_conversation_is_made_the_same_way() -> None:
    student, teacher = talking("tagged"), with_template(TEACHER, ROLES)
    prompt = Prompt(6, [*EARLIER, {"role": "user", "content": "6 * 7?"}], response="It is 42.")
    rollout = dataset_rollout(prompt, ConversationRenderer(student), 999)
    sample = chat_maker(student, teacher)(rollout)
    assert learned(student, sample.student) == "It is 42.<|im_end|>"
    assert learned(teacher, sample.teachers[0].tokens) == "It is 42.<|im_end|>"
    assert rollout.messages[-1] == {"role": "assistant", "content": "It is 42."}
    with pytest.raises(DataError, match=r"prompt 6 .* no response"):
        dataset_rollout(Prompt(6, "a"), TextRenderer(STUDENT), 99)
