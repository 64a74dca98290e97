"""Rows of files as prompts: layouts, cut conversations and refused rows."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_opd.config.data import Data, Source
from nemo_opd.data.columns import document_layout
from nemo_opd.data.document_sources import load_documents
from nemo_opd.data.rollouts import read_prompts
from nemo_opd.data.row_types import Prompt
from nemo_opd.errors import DataError

USER = {"role": "user", "content": "6 * 7?"}
ANSWER = {"role": "assistant", "content": "42"}
TEXTS = Data(text_key="question")
CHATS = Data(messages_key="chat", tools_key="tools")


def load(folder: Path, rows: dict[str, list[Any]], data: Data, **keys: Any) -> Any:
    pq.write_table(pa.table(rows), folder / "prompts.parquet")
    source = Source(parquet_files=(str(folder / "prompts.parquet"),))
    return load_documents(source, document_layout(data).with_prompts(**keys), key="data.train")


def test_texts_with_answers_and_responses(tmp_path: Path) -> None:
    rows = {"question": ["a", "b", "c"], "answer": ["x", None, "z"], "told": ["1", "2", None], "more": [1, 2, 3]}
    documents = load(tmp_path, rows, TEXTS, answer_key="answer", response_key="told")
    prompts = read_prompts(documents, [2, 0, 1])
    assert prompts == [
        Prompt(2, "c", answer="z"),
        Prompt(0, "a", answer="x", response="1"),
        Prompt(1, "b", response="2"),
    ]
    assert read_prompts(documents, []) == []
    assert read_prompts(load(tmp_path, rows, TEXTS), [0]) == [Prompt(0, "a")]


def test_answers_may_be_the_responses(tmp_path: Path) -> None:
    """Bug: validation refuses a file of questions and answers because the reward reads the answers, too."""
    rows = {"question": ["a", "b"], "answer": ["x", None]}
    for data, keys in (
        (TEXTS, {"answer_key": "answer", "response_key": "answer"}),
        (Data(prompt_key=("question",), completion_key="answer"), {"answer_key": "answer"}),
    ):
        layout = document_layout(data).with_prompts(**keys)
        (prompt,) = read_prompts(load(tmp_path, {name: rows[name][:1] for name in rows}, data, **keys), [0], layout)
        assert (prompt.answer, prompt.response, prompt.row) == ("x", "x", {"question": "a", "answer": "x"})


@pytest.mark.parametrize(
    ("answers", "texts"),
    [([42, -1], ["42", "-1"]), ([42.0, 0.1], ["42", "0.1"]), ([10.0**30, 2.5], [str(int(1e30)), "2.5"])],
)
def test_answers_that_are_numbers(tmp_path: Path, answers: list[Any], texts: list[str]) -> None:
    documents = load(tmp_path, {"question": ["a", "b"], "n": answers}, TEXTS, answer_key="n")
    assert [prompt.answer for prompt in read_prompts(documents, [0, 1])] == texts


@pytest.mark.parametrize("as_json", [False, True])
def test_conversations_end_before_the_assistants_last_turn(tmp_path: Path, as_json: bool) -> None:
    """Catches a final answer that stays in the prompt, and earlier assistant turns that are cut off."""
    chats = [[USER], [USER, ANSWER], [USER, ANSWER, {"role": "user", "content": "Sure?"}, ANSWER, ANSWER]]
    tool = {"type": "function", "function": {"name": "clock"}}
    rows: dict[str, list[Any]] = {"chat": chats, "tools": [[tool], [tool], None], "answer": ["42"] * 3}
    if as_json:
        rows |= {"chat": [json.dumps(chat) for chat in chats], "tools": [json.dumps([tool])] * 2 + [None]}
    documents = load(tmp_path, rows, CHATS, answer_key="answer")
    assert read_prompts(documents, [0, 1, 2]) == [
        Prompt(0, [USER], [tool], "42", None),
        Prompt(1, [USER], [tool], "42", "42"),
        Prompt(2, [USER, ANSWER, {"role": "user", "content": "Sure?"}], None, "42", "42\n42"),
    ]


@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        ([ANSWER], "row 1 .* no user message .*roles: assistant"),
        ([{"role": "system", "content": "Be kind."}, ANSWER], "row 1 .* no user message .*system, assistant"),
    ],
)
def test_a_conversation_that_cannot_be_answered_names_its_row(tmp_path: Path, chat: Any, reason: str) -> None:
    chats = [json.dumps([USER]), json.dumps(chat)]
    with pytest.raises(DataError, match=reason):
        read_prompts(load(tmp_path, {"chat": chats}, Data(messages_key="chat")), [0, 1])


@pytest.mark.parametrize(
    ("rows", "keys", "reason"),
    [
        ({"question": ["a"]}, {"answer_key": "answer"}, "no column 'answer'; set reward.answer_key"),
        ({"question": ["a"]}, {"response_key": "told"}, "no column 'told'; set data.response_key"),
        ({"question": ["a"], "answer": [[1]]}, {"answer_key": "answer"}, "set reward.answer_key to a column of str"),
        ({"question": ["a"], "answer": [True]}, {"answer_key": "answer"}, "is of type bool"),
        ({"question": ["a"], "told": [1]}, {"response_key": "told"}, "is of type int64; set data.response_key"),
        (
            {"question": ["a"]},
            {"answer_key": "question"},
            "reward.answer_key=question: that column already holds the prompts' text",
        ),
    ],
)
def test_columns_that_are_missing_or_of_another_kind(
    tmp_path: Path, rows: dict[str, Any], keys: dict[str, str], reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        load(tmp_path, rows, TEXTS, **keys)
