"""Catches question sets that read the wrong columns or ignore their own settings."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_opd.config.data import Data
from nemo_opd.config.evaluation import Evaluation, EvaluationConfig
from nemo_opd.config.reward import FunctionReward, NumericReward
from nemo_opd.data.row_types import Prompt
from nemo_opd.errors import ConfigError, DataError
from nemo_opd.evaluation.question_sets import resolved_sets
from nemo_opd.evaluation.questions import read_questions

ROWS = [
    {"question": "2 + 2?", "answer": 4, "level": 1, "tests": ["a", "b"], "data_source": "sums"},
    {"question": "3 * 3?", "answer": 9, "level": 2, "tests": [], "data_source": "products"},
]
CHATS = [{"messages": [{"role": "user", "content": "Hi"}], "answer": "x", "hint": "be kind"}]


def questions(folder: Path, rows: list[dict[str, Any]], suffix: str = "jsonl", **settings: Any) -> list[Prompt]:
    file = folder / f"questions.{suffix}"
    if suffix == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), file)
    data = {f"{suffix}_files": str(file), **settings.pop("data", {})}
    evaluation = Evaluation(sets={"own": {"data": data, **settings}})
    (question_set,) = resolved_sets(evaluation, Data(), NumericReward(), "evaluation.")
    return read_questions(question_set)


def test_a_set_inherits_the_settings_of_evaluation() -> None:
    """Bugs: a set with defaults in place of inherited settings; settings that change in a round trip."""
    data = {"jsonl_files": "x.jsonl"}
    evaluation = Evaluation(n=8, k=[1, 8], temperature=0.6, sets={"a": {"data": data}, "b": {"data": data, "n": 16}})

    assert [(settings.n, settings.k, settings.temperature) for settings in evaluation.all_sets.values()] == [
        (8, (1, 8), 0.6),
        (16, (1, 8), 0.6),
    ]
    assert Evaluation.model_validate(evaluation.model_dump(mode="json")) == evaluation


def test_stop_texts_need_a_single_turn() -> None:
    """Bug: the next turn of a conversation follows a cut turn, whose message lacks the cut tokens."""
    chats = {"messages_key": "messages", "jsonl_files": "x"}
    settings = {"model": "demo:student", "reward": {"type": "numeric"}, "sets": {"a": {"data": chats, "stop": "\n"}}}
    assert EvaluationConfig.model_validate(settings).sets["a"].stop == ("\n",)
    with pytest.raises(ValueError, match=r"sets\.a\.stop=\['\\n'\]: an environment answers whole turns"):
        EvaluationConfig.model_validate(
            settings | {"environment": {"type": "calculator"}, "data": {"messages_key": "messages"}}
        )


@pytest.mark.parametrize("stop", ["", ["a", ""]])
def test_an_empty_stop_text_is_refused(stop: str | list[str]) -> None:
    with pytest.raises(ValueError, match="is empty; write a value"):
        Evaluation(stop=stop)


@pytest.mark.parametrize("name", ["a b", "greedy", "x/y", ""])
def test_a_set_name_that_cannot_be_in_a_metric_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a set in metrics"):
        Evaluation(sets={name: {"data": {"jsonl_files": "x"}}})


def test_a_prompt_is_written_around_the_question(tmp_path: Path) -> None:
    prompts = questions(
        tmp_path, ROWS, data={"text_key": "question"}, prompt="{prompt} (level {level}, {question}) {{}}"
    )
    assert [prompt.content for prompt in prompts] == ["2 + 2? (level 1, 2 + 2?) {}", "3 * 3? (level 2, 3 * 3?) {}"]
    assert [prompt.answer for prompt in prompts] == ["4", "9"]


def test_a_conversation_has_the_sets_system_message(tmp_path: Path) -> None:
    reward = {"type": "exact"}
    settings = {"data": {"messages_key": "messages"}, "system_prompt": "Please {hint}.", "reward": reward}
    (prompt,) = questions(tmp_path, CHATS, **settings)
    assert prompt.content == [{"role": "system", "content": "Please be kind."}, {"role": "user", "content": "Hi"}]


def test_texts_have_no_system_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluation.sets.own.system_prompt='x': the questions are texts"):
        questions(tmp_path, ROWS, data={"text_key": "question"}, system_prompt="x")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_reward_of_the_user_gets_every_column(tmp_path: Path, suffix: str) -> None:
    reward = FunctionReward(function="a.b:c", answer_key="answer").model_dump()
    prompts = questions(tmp_path, ROWS, suffix, data={"text_key": "question"}, reward=reward)
    assert [prompt.row for prompt in prompts] == ROWS


def test_levels_come_from_a_column(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    settings = {"data": {"jsonl_files": str(file), "text_key": "question"}}
    evaluation = Evaluation(level_key="level", sets={"a": settings, "b": {**settings, "level_key": "data_source"}})
    sets = list(resolved_sets(evaluation, Data(), NumericReward(), "evaluation."))
    assert [question_set.levels(read_questions(question_set)) for question_set in sets] == [
        ("1", "2"),
        ("sums", "products"),
    ]
    with pytest.raises(DataError, match=r"no column 'kind', which evaluation\.sets\.own\.level_key names"):
        questions(tmp_path, ROWS, data={"text_key": "question"}, level_key="kind")


def test_the_column_of_sources_is_needed_in_every_row(tmp_path: Path) -> None:
    reward = {"type": "by_source", "rewards": {"sums": {"type": "numeric"}, "products": {"type": "exact"}}}
    settings = {"data": {"text_key": "question"}, "reward": reward}
    assert [prompt.row["data_source"] for prompt in questions(tmp_path, ROWS, **settings)] == ["sums", "products"]
    with pytest.raises(DataError, match=r"has no column 'data_source', which evaluation.sets.own.reward.key names"):
        questions(tmp_path, [{"question": "?", "answer": 1}], **settings)
