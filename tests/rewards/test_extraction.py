"""Catches answers from the wrong place of a response, and rewards that combine other rewards wrongly."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from nemo_opd.config.reward import Extraction, Reward
from nemo_opd.data.row_types import Prompt, Rollout
from nemo_opd.errors import ConfigError, DataError, RolloutError
from nemo_opd.rewards import build_reward, check_answers
from nemo_opd.rewards.extraction import build_extractor
from tests.rewards.rollouts import rollout

NUMERIC_IN_A_BOX = {"type": "numeric", "extract": {"type": "boxed"}}
FORM = {"type": "format", "extract": {"type": "answer_line"}}


def extracted(text: str, **settings: Any) -> str | None:
    return build_extractor(TypeAdapter(Extraction).validate_python(settings))(text)


def reward_of(response: Rollout, **settings: Any) -> float:
    with build_reward(TypeAdapter(Reward).validate_python(settings)) as reward:
        return reward(response)


@pytest.mark.parametrize(
    ("settings", "text", "answer"),
    [
        ({"type": "last_turn"}, " 7 \n", "7"),
        ({"type": "boxed"}, r"\boxed{1}, so \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ({"type": "boxed"}, "7", None),
        ({"type": "answer_line"}, "Answer: 3\nno,\n**answer:** 4.\nbye", "4"),
        ({"type": "answer_line", "marker": "A:"}, "A: red fox", "red fox"),
        ({"type": "answer_line"}, "the answer is 3", None),
        ({"type": "answer_line"}, "Answer:\n3", None),
        ({"type": "choice"}, "(A) is wrong, so the answer is (C), not (B).", "C"),
        ({"type": "choice"}, "A cat, so B.", "B"),
        ({"type": "choice"}, r"A. or \boxed{\text{D}}", "D"),
        ({"type": "choice"}, "Answer: **C**", "C"),
        ({"type": "choice", "letters": "AB"}, "(C)", None),
        ({"type": "choice"}, "It's a dog", None),
        ({"type": "choice"}, "Answer: I think it is B.", "B"),
        ({"type": "choice"}, "The answer is I don't know", None),
        ({"type": "choice"}, r"\boxed{DNA}", None),
        ({"type": "choice", "letters": "AB"}, r"\boxed{C}", None),
        ({"type": "choice"}, r"Answer: \text{C}", "C"),
        ({"type": "choice"}, "the answer is [C]", "C"),
        ({"type": "choice"}, "Answer: A cat, so B.", "B"),
        ({"type": "choice"}, "The answer is A because of B.", "A"),
        ({"type": "choice"}, r"The answer is: $\mathrm{D}$", "D"),
        ({"type": "choice"}, "Option A is wrong, so B", "B"),
        ({"type": "choice"}, "*" * 200_000 + "answer" + " " * 200_000, None),
        ({"type": "answer_line"}, "**Answer: 42.**", "42"),
        ({"type": "answer_line"}, "The Answer: 7 Answer: 8", "8"),
        ({"type": "json", "key": "answer.²"}, '{"answer": [1, 2, 3]}', None),
        ({"type": "json"}, ("[" + "1," * 500) * 1000, None),
        ({"type": "json", "key": "answer"}, "x[0] " * 1200 + "y[i] " * 1200 + '{"answer": 5}', "5"),
        ({"type": "regex", "pattern": r"^#### (\S+)"}, "#### 1\n#### 2\n", "2"),
        ({"type": "regex", "pattern": r"\d+"}, "1 and 22", "22"),
        ({"type": "regex", "pattern": r"\d+"}, "none", None),
        ({"type": "regex", "pattern": r"(a+)+$", "timeout_s": 0.2}, "a" * 60 + "b", None),
        ({"type": "json", "key": "steps.1"}, 'So ```json\n{"steps": [1, {"b": 2, "a": 1}]}\n```', '{"a": 1, "b": 2}'),
        ({"type": "json", "key": "answer"}, '{"answer": "x"} then {"answer": "y"}', "y"),
        ({"type": "json"}, '{"answer": ', None),
        ({"type": "json", "key": "answer"}, "[1, 2]", None),
    ],
)
def test_the_answer_of_a_response(settings: dict[str, Any], text: str, answer: str | None) -> None:
    assert extracted(text, **settings) == answer


def test_json_has_to_match_its_schema(tmp_path: Path) -> None:
    schema = {"type": "object", "required": ["answer"], "properties": {"answer": {"type": "integer"}}}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    settings = {"type": "json", "key": "answer", "schema_file": str(tmp_path / "schema.json")}

    assert extracted('{"answer": 4}', **settings) == "4"
    assert extracted('{"answer": "4"}', **settings) is None


def test_a_schema_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the first answer opened a connection to the machine that the schema refers to."""
    requests = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *arguments, **_: requests.append(arguments))
    (tmp_path / "schema.json").write_text('{"$ref": "http://127.0.0.1:9/schema.json"}')
    with pytest.raises(RolloutError, match=r"127.0.0.1:9/schema.json cannot be found"):
        extracted("{}", type="json", schema_file=str(tmp_path / "schema.json"))
    assert not requests


def test_a_pattern_of_a_schema_has_a_limit(tmp_path: Path) -> None:
    """Bug: a single answer keeps a run busy for years."""
    (tmp_path / "schema.json").write_text('{"items": {"pattern": "^(a+)+$"}}')
    settings = {"type": "json", "schema_file": str(tmp_path / "schema.json"), "timeout_s": 0.2}
    assert extracted(json.dumps(["a" * 40 + "!"]), **settings) is None
    assert extracted('["aaa"]', **settings) == '["aaa"]'


def test_a_schema_that_refers_to_itself_is_an_error_of_the_reward(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"$ref": "#"}')
    with pytest.raises(RolloutError, match=r"the schema raised RecursionError"):
        extracted("{}", type="json", schema_file=str(tmp_path / "schema.json"))


def test_a_schema_that_refers_to_nothing_is_an_error_of_the_reward(tmp_path: Path) -> None:
    """Bug: an error of the library ends the run with a traceback."""
    (tmp_path / "schema.json").write_text('{"$ref": "#/$defs/none"}')
    with pytest.raises(RolloutError, match=r"schema_file: .*/\$defs/none cannot be found"):
        extracted("{}", type="json", schema_file=str(tmp_path / "schema.json"))


@pytest.mark.parametrize("content", ["{", '{"type": "nothing of the kind"}', None])
def test_a_schema_that_cannot_be_read_is_one_message(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"reward.extract.schema_file=.*schema.json: not a JSON schema: .+; correct"):
        extracted("", type="json", schema_file=str(file))


def test_a_pattern_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValidationError, match="not a regular expression"):
        extracted("", type="regex", pattern="(")


def test_rewards_read_the_extracted_answer() -> None:
    """Bug: the last number of the text is compared instead of the box."""
    response = rollout(r"\boxed{7}, in 3 steps. Answer: 9", "7")

    assert reward_of(response, **NUMERIC_IN_A_BOX) == 1
    assert reward_of(response, type="numeric") == 0
    assert reward_of(response, type="exact", extract={"type": "boxed"}) == 1
    assert reward_of(response, type="math", extract={"type": "answer_line"}) == 0
    assert reward_of(response, **FORM) == 1
    assert reward_of(rollout("7", "7"), **FORM) == 0


def test_a_weighted_reward_is_a_sum_and_votes_with_the_first_part_that_can() -> None:
    settings = {"type": "weighted", "terms": [{"weight": 0.25, "reward": FORM}, {"reward": NUMERIC_IN_A_BOX}]}
    response = rollout("\\boxed{7}\nAnswer: 7", "7")
    reward = build_reward(TypeAdapter(Reward).validate_python(settings))

    assert reward(response) == 1.25
    assert reward.votes
    assert reward.vote(response) == "7"


SOURCES = {"type": "by_source", "rewards": {"gsm8k": {"type": "numeric"}, "default": {"type": "exact"}}}


@pytest.mark.parametrize(("source", "value"), [("gsm8k", 1), ("trivia", 0)])
def test_a_row_is_judged_by_the_reward_of_its_source(source: str, value: float) -> None:
    response = rollout("It is 7", "7")
    assert (
        reward_of(replace(response, prompt=replace(response.prompt, row={"data_source": source})), **SOURCES) == value
    )


def test_a_source_without_a_reward_is_refused_with_its_row() -> None:
    settings = TypeAdapter(Reward).validate_python({**SOURCES, "rewards": {"gsm8k": {"type": "numeric"}}})
    prompts = [Prompt(0, "?", answer="1", row={"data_source": "gsm8k"}), Prompt(3, "?", answer="1", row={})]
    with pytest.raises(DataError, match=r"row 3 .*data_source='None' has no reward \(there are gsm8k\)"):
        check_answers(settings, prompts, source="data.train")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {
                "type": "weighted",
                "terms": [{"reward": {"type": "exact"}}, {"reward": {"type": "exact", "answer_key": "b"}}],
            },
            "compare with the columns answer and b",
        ),
        ({"type": "by_source", "rewards": {"x": {"type": "exact", "weighting_beta": 1}}}, "weighting_beta of a part"),
    ],
)
def test_parts_that_cannot_be_combined_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(Reward).validate_python(settings)
