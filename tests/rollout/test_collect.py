"""Collected rollouts: order, masks, lengths, seeds, turns, and metrics."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest

from nemo_opd.config.rollout import EnvironmentBase
from nemo_opd.data.row_types import Message, Prompt, Rollout
from nemo_opd.errors import DataError, RolloutError
from nemo_opd.rollout.collect import Collector, chosen_share, repetition, rollout_metrics, turn_seed
from nemo_opd.rollout.conversation import ConversationRenderer
from nemo_opd.rollout.engine_interface import Request, Sampling
from nemo_opd.rollout.environment import Calculator, EnvironmentFactory, EnvironmentStep
from nemo_opd.rollout.renderer import TextRenderer
from tests.rollout.scripted import Scripted, asking, encoded, speaking
from tests.rollout.templates import talking
from tests.tokenizers_fixture import byte_level, real_tokenizer

GREEDY = Sampling(temperature=0.0)
EOS = byte_level().eos_token_id


def text_collector(engine: Scripted, **options: Any) -> Collector:
    defaults = {"sampling": GREEDY, "max_new_tokens": 5, "max_length": 40, "seed": 9}
    return Collector(engine, TextRenderer(byte_level()), **(defaults | options))


def chat_collector(engine: Scripted, tokenizer: Any, **options: Any) -> Collector:
    limits = {key: options.pop(key) for key in ("max_turns", "max_response_tokens") if key in options}
    options["environment"] = EnvironmentFactory(options["environment"], EnvironmentBase(**limits))
    defaults = {"sampling": GREEDY, "max_new_tokens": 60, "max_length": 900, "seed": 9}
    return Collector(engine, ConversationRenderer(tokenizer), **(defaults | options))


def test_rollouts_come_prompt_by_prompt_from_one_call() -> None:
    engine = Scripted(lambda request: ([int(request.prompt_ids[-1]), EOS], "stop"))
    prompts = [Prompt(4, "the fox"), Prompt(2, "a dog")]
    rollouts = text_collector(engine).collect(prompts, 3, step=5)
    assert [(r.prompt.index, r.sample) for r in rollouts] == [(4, 0), (4, 1), (4, 2), (2, 0), (2, 1), (2, 2)]
    (requests,) = engine.calls
    assert [request.seed for request in requests] == [turn_seed(9, 5, i, k, 0) for i in (4, 2) for k in range(3)]
    for request, rollout in zip(requests, rollouts, strict=True):
        text = rollout.prompt.content
        assert request.prompt_ids.tolist() == encoded(byte_level(), str(text))
        assert rollout.ids.tolist() == [*request.prompt_ids, request.prompt_ids[-1], EOS]
        assert rollout.version == 7


@pytest.mark.parametrize(
    ("text", "finish_reason", "response"),
    [(" fox", "stop", " fox"), (" fox", "length", " fox"), ("", "stop", "")],
)
def test_masks_end_with_the_end_of_sequence(text: str, finish_reason: Any, response: str) -> None:
    """Bug: a mask that leaves out the end of sequence if it is also the padding token."""
    ids = encoded(byte_level(), text) + [EOS] * (finish_reason == "stop")
    engine = Scripted(lambda request: (ids, finish_reason))
    (rollout,) = text_collector(engine).collect([Prompt(0, "the quick", answer="x")], 1, 0)
    start = len(encoded(byte_level(), "the quick"))
    assert rollout.loss_mask.tolist() == [False] * start + [True] * len(ids)
    assert rollout.logprobs.tolist() == [0.0] * start + [-1.0 - k for k in range(len(ids))]
    assert rollout.behaviour_logprobs.tolist() == [0.0] * start + [-0.5 - k for k in range(len(ids))]
    assert rollout.turns.tolist() == [[start, start + len(ids)]]
    assert rollout.responses == (response,)
    assert (rollout.finish_reason, rollout.messages, rollout.env_reward) == (finish_reason, (), None)
    assert (rollout.ids.dtype, rollout.logprobs.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize(
    ("text", "finish_reason", "response"),
    [(" fox\n\nthe", "stop", " fox"), (" fox\n", "length", " fox\n"), ("\n\n", "stop", "")],
)
def test_a_response_ends_before_its_stop_text(text: str, finish_reason: Any, response: str) -> None:
    """Bug: the response contains the stop text, or lacks the token before it."""
    engine = Scripted(lambda request: (encoded(byte_level(), text), finish_reason))
    collector = text_collector(engine, stop=("\n\n",), max_new_tokens=30)
    (rollout,) = collector.collect([Prompt(0, "the quick")], 1, 0)

    assert rollout.responses == (response,)
    assert engine.calls[0][0].stop == ("\n\n",)


def test_an_end_token_after_a_response_without_its_stop_text() -> None:
    (rollout,) = text_collector(speaking(byte_level(), EOS, " fox"), stop=("\n",)).collect([Prompt(0, "a")], 1, 0)
    assert rollout.responses == (" fox",)


def test_no_sequence_is_longer_than_max_length() -> None:
    engine = Scripted(lambda request: ([5] * request.max_new_tokens, "length"))
    length = len(encoded(byte_level(), "the fox"))
    (rollout,) = text_collector(engine, max_length=length + 2).collect([Prompt(0, "the fox")], 1, 0)
    assert (len(rollout.ids), engine.calls[0][0].max_new_tokens) == (length + 2, 2)
    with pytest.raises(DataError, match=f"prompt 8 .* has {length} tokens.* no room .* in {length}"):
        text_collector(engine, max_length=length).collect([Prompt(8, "the fox")], 1, 0)


@pytest.mark.parametrize("ids", [[], [5] * 6])
def test_an_engines_completion_of_the_wrong_length_is_an_error(ids: list[int]) -> None:
    with pytest.raises(RolloutError, match=f"prompt 8, sample 0, with {len(ids)} tokens.* 1 to 5"):
        text_collector(Scripted(lambda request: (ids, "length"))).collect([Prompt(8, "the fox")], 1, 0)


def test_texts_have_no_environment() -> None:
    environment = EnvironmentFactory(Calculator, EnvironmentBase())
    with pytest.raises(RolloutError, match=r"data\.messages_key"):
        text_collector(Scripted(lambda request: ([5], "length")), environment=environment)


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'


@pytest.mark.tokenizers
def test_a_conversation_with_the_calculator() -> None:
    """Compare ids, masks, texts, messages and the reward with Qwen's template of the entire conversation."""
    tokenizer = real_tokenizer("qwen3")
    thought = "<think>\nhm\n</think>\n\n"
    turns = (f"{thought}I ask.\n{CALL}", f"{thought}<tool_call>6 * 7</tool_call>", f"{thought}It is 42.")
    engine = speaking(tokenizer, tokenizer.eos_token_id, *turns)
    collector = chat_collector(engine, tokenizer, environment=Calculator)
    (rollout,) = collector.collect([asking("6 * 7?", answer="42")], 1, 2)
    messages = [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": turns[0]}]
    messages += [{"role": "tool", "name": "calculator", "content": "42"}, {"role": "assistant", "content": turns[1]}]
    error = rollout.messages[4]["content"]
    messages += [{"role": "tool", "name": "calculator", "content": error}, {"role": "assistant", "content": turns[2]}]
    assert list(rollout.messages) == messages
    assert error.startswith("error: the call cannot be read: no JSON")
    assert rollout.turn_messages == [1, 3, 5]
    text = tokenizer.apply_chat_template(messages, tools=list(Calculator.tools), tokenize=False)
    assert tokenizer.decode(rollout.ids) == text.rstrip("\n")
    assert rollout.ids.tolist() == encoded(tokenizer, text.rstrip("\n"))
    sampled = [rollout.ids[start:stop].tolist() for start, stop in rollout.turns]
    assert sampled == [[*encoded(tokenizer, turn), tokenizer.eos_token_id] for turn in turns]
    assert rollout.loss_mask.sum() == sum(map(len, sampled))
    assert rollout.responses == turns
    assert (rollout.env_reward, rollout.env_done, rollout.num_calls, rollout.num_failed_calls) == (1.0, True, 2, 1)
    assert [len(call) for call in engine.calls] == [1, 1, 1]
    assert [calls[0].seed for calls in engine.calls] == [turn_seed(9, 2, 3, 0, turn) for turn in range(3)]


@dataclass
class Counting:
    """An environment that returns `answer` until the number of turns in the prompt's answer."""

    answer: str = "Go on."
    turn: int = 0

    def reset(self, prompt: Prompt) -> list[Message]:
        self.turns = int(prompt.answer or 99)
        return [{"role": "user", "content": "Start!"}, {"role": "system", "content": "Count."}]

    def step(self, messages: Sequence[Message]) -> EnvironmentStep:
        self.turn += 1
        return EnvironmentStep([{"role": "user", "content": self.answer}], self.turn == self.turns, reward=0.5)


END = talking("tagged").eos_token_id


def saying(text: str) -> Scripted:
    return Scripted(lambda request: ([*encoded(talking("tagged"), text), END], "stop"))


def test_active_conversations_continue_in_one_batch() -> None:
    engine = saying("one")
    prompts = [asking("a", 0, answer="1"), asking("b", 1, answer="3"), asking("c", 2, answer="9")]
    rollouts = chat_collector(engine, talking("tagged"), environment=Counting).collect(prompts, 2, 0)
    assert [len(call) for call in engine.calls] == [6, 4, 4, 2]
    assert [(len(r.turns), r.env_reward, r.env_done) for r in rollouts] == [
        *[(1, 0.5, True)] * 2,
        *[(3, 1.5, True)] * 2,
        *[(4, 2.0, False)] * 2,
    ]
    roles = [message["role"] for message in rollouts[0].prompt.content]  # type: ignore[union-attr]
    assert roles == ["system", "user", "user"]
    assert rollouts[2].messages[-1] == {"role": "assistant", "content": "one"}


def test_a_cut_turn_ends_the_conversation_and_is_rewarded() -> None:
    engine = Scripted(lambda request: (encoded(talking("tagged"), "one"), "length"))
    (rollout,) = chat_collector(engine, talking("tagged"), environment=Counting).collect([asking("a")], 1, 0)
    assert (len(rollout.turns), rollout.finish_reason, rollout.env_reward) == (1, "length", 0.5)
    assert rollout.env_done is False


def test_an_answer_without_room_for_a_turn_is_left_out() -> None:
    tokenizer = talking("tagged")
    long = chat_collector(saying("one"), tokenizer, environment=Counting).collect([asking("a")], 1, 0)[0]
    for room in range(int(long.turns[0, 1]), int(long.turns[1, 0]) + 1):
        collector = chat_collector(saying("one"), tokenizer, environment=Counting, max_length=room)
        (rollout,) = collector.collect([asking("a")], 1, 0)
        assert rollout.ids.tolist() == long.ids[: long.turns[0, 1]].tolist()
        assert (len(rollout.messages), rollout.finish_reason, rollout.env_done) == (4, "stop", False)


def test_a_long_answer_is_cut_with_a_mark() -> None:
    tokenizer = talking("tagged")
    answer = "the quick brown fox " * 20
    collector = chat_collector(
        saying("one"), tokenizer, environment=lambda: Counting(answer), max_response_tokens=40, max_turns=2
    )
    (rollout,) = collector.collect([asking("a")], 1, 0)
    cut_answer = rollout.messages[4]["content"]
    assert cut_answer.endswith(" [cut: the response was too long]")
    beginning = cut_answer.removesuffix(" [cut: the response was too long]")
    assert answer.startswith(beginning)
    assert beginning
    assert len(encoded(tokenizer, cut_answer)) <= 40
    assert rollout.num_cut_responses == 1


def test_a_template_without_tools_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = talking("without_ends")
    engine = Scripted(lambda request: ([*encoded(tokenizer, "7"), tokenizer.eos_token_id], "stop"))
    collector = chat_collector(engine, tokenizer, environment=Calculator)
    for step in range(2):
        collector.collect([asking("a"), asking("b")], 2, step)
    assert [record.message for record in caplog.records if "does not show tools" in record.message] == [
        caplog.records[0].message
    ]


def rollout_of(ids: Sequence[int], turns: Sequence[Sequence[int]], **fields: Any) -> Rollout:
    mask = np.zeros(len(ids), np.bool_)
    for start, stop in turns:
        mask[start:stop] = True
    defaults = {"finish_reason": "stop", "version": 0, "messages": (), "responses": ("",) * len(turns)}
    array, zeros = np.array(ids, np.int32), np.zeros(len(ids), np.float32)
    return Rollout(Prompt(0, ""), 0, array, mask, zeros, zeros, np.array(turns, np.int32), **(defaults | fields))


def test_repetition_is_the_share_of_repeated_4_grams() -> None:
    """Counted by hand: 3 of the 6 4-grams of abcabcabc are new; 4-grams across turns or in prompts do not count."""
    assert repetition(rollout_of([9, *[1, 2, 3] * 3], [[1, 10]])) == 0.5
    assert repetition(rollout_of([1, 2, 3, 4, 1, 2, 3, 4], [[4, 8]])) == 0
    assert repetition(rollout_of([1, 2, 3, 4, 9, 1, 2, 3, 4], [[0, 4], [5, 9]])) == 0.5
    assert repetition(rollout_of([1, 1, 1, 1], [[1, 4]])) is None


def test_metrics_of_rollouts() -> None:
    rollouts = [
        rollout_of([1, 2, 3], [[1, 3]], env_reward=1.0, env_done=True),
        rollout_of(
            [1, *[7] * 8], [[1, 4], [5, 9]], finish_reason="length", env_reward=0.0, env_done=False, num_calls=4
        ),
        rollout_of([1, *[7] * 5], [[1, 6]], env_reward=0.0, env_done=True, num_calls=1, num_failed_calls=1),
    ]
    values = {name: metric.value() for name, metric in rollout_metrics(rollouts).items()}
    assert values == pytest.approx(
        {
            "rollout/response_length": (2 + 7 + 5) / 3,
            "rollout/response_length_max": 7,
            "rollout/truncation_rate": 1 / 3,
            "rollout/eos_rate": 2 / 3,
            "rollout/repetition": (0 + 1 / 2) / 2,
            "rollout/turns": 4 / 3,
            "rollout/tool_calls": 5 / 3,
            "rollout/failed_calls": 1 / 5,
            "rollout/cut_tool_responses": 0,
            "rollout/unfinished_rate": 1 / 3,
        }
    )
    assert "rollout/turns" not in rollout_metrics([rollout_of([1, 2], [[1, 2]])])


def test_requests_do_not_depend_on_their_batch() -> None:
    def answer(request: Request) -> tuple[Sequence[int], Any]:
        return [request.seed % 200 + 10, EOS], "stop"

    prompts = [Prompt(i, f"the fox {i}") for i in range(4)]
    together = text_collector(Scripted(answer)).collect(prompts, 2, 3)
    alone = [r for prompt in prompts[::-1] for r in text_collector(Scripted(answer)).collect([prompt], 2, 3)]
    place = {(r.prompt.index, r.sample): r.ids.tolist() for r in alone}
    assert [place[r.prompt.index, r.sample] for r in together] == [r.ids.tolist() for r in together]
    assert len({tuple(r.ids) for r in together}) > 4


def test_seeds_differ_in_every_part_and_fit() -> None:
    """Catches SeedSequence's padding, which gives [1] and [1, 0] the same seed, and seeds that engines refuse."""
    places = list(product((0, 1, 2**32, 2**40), (0, 1), (0, 1, 2), (0, 1), (0, 1)))
    seeds = [turn_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [turn_seed(*place) for place in places]


@pytest.mark.parametrize(("share", "number"), [(0.0, {0}), (1.0, {5}), (0.5, {2, 3})])
def test_a_share_holds_in_each_batch_and_on_average(share: float, number: set[int]) -> None:
    choices = [chosen_share("abcde", share, 3, step) for step in range(2000)]
    assert {sum(batch) for batch in choices} == number
    # 10,000 draws of variance at most 1/4 each: five standard deviations are 0.025.
    assert abs(np.mean(choices) - share) < 0.025
    assert (np.abs(np.mean(choices, axis=0) - share) < 0.06).all()
    assert choices[3] == chosen_share("abcde", share, 3, 3)
