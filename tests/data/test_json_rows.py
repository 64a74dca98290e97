"""JSON rows come back from datasets unchanged."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_opd.config.data import Source
from nemo_opd.data.columns import chat_layout, text_layout
from nemo_opd.data.document_sources import load_documents
from nemo_opd.data.lines import column_types
from nemo_opd.data.rollouts import read_prompts
from nemo_opd.data.row_types import Conversation, read_documents, read_rows
from nemo_opd.data.sample_cache import _key_of
from nemo_opd.data.source_files import require_suitable
from nemo_opd.errors import DataError

LARGE = 12345678901234567890123
CHAT = chat_layout("messages", "tools")
ARGUMENTS: list[dict[str, Any]] = [
    {"unit": None, "city": "Bern"},
    {"city": "Ulm", "unit": "K"},
    {"n": LARGE, "x": 1.0, "day": "2024-01-01", "deep": [{"a": None}, {}]},
    {},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"default": None, "enum": ["b", None, "a"]}}}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf_cache"))


def conversation(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> Source:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(jsonl_files=str(folder / "rows.jsonl"))


def parquet(folder: Path, table: pa.Table) -> Source:
    pq.write_table(table, folder / "rows.parquet")
    return Source(parquet_files=str(folder / "rows.parquet"))


@pytest.mark.parametrize("kind", ["jsonl", "jsonl_of_text", "text", "arrow_json", "list_of_arrow_json"])
def test_values_of_conversations_stay(tmp_path: Path, kind: str) -> None:
    """Bugs: lost nulls, added keys of other rows, large integers as floats, parsed dates, keys in another order."""
    chats = [conversation(arguments) for arguments in ARGUMENTS]
    texts = {"messages": list(map(json.dumps, chats)), "tools": [json.dumps([TOOL])] * len(chats)}
    if kind == "jsonl":
        source = jsonl(tmp_path, [{"messages": chat, "tools": [TOOL]} for chat in chats])
    elif kind == "jsonl_of_text":
        source = jsonl(tmp_path, pa.table(texts).to_pylist())
    elif kind == "text":
        source = parquet(tmp_path, pa.table(texts))
    elif kind == "arrow_json":
        source = parquet(tmp_path, pa.table({name: pa.array(column, pa.json_()) for name, column in texts.items()}))
    else:
        flat = [json.dumps(message) for chat in chats for message in chat]
        values = pa.ExtensionArray.from_storage(pa.json_(), pa.array(flat))
        column = pa.ListArray.from_arrays(range(0, len(flat) + 1, 2), values)
        source = parquet(tmp_path, pa.table({"messages": column, "tools": pa.array(texts["tools"])}))
    documents = load_documents(source, CHAT, key="data.train")
    read = read_documents(documents, [3, 2, 1, 0])
    assert read == [Conversation(chat, [TOOL]) for chat in reversed(chats)]
    assert [json.dumps(document.messages) for document in read] == list(map(json.dumps, reversed(chats)))  # type: ignore[union-attr]
    prompts = read_prompts(documents, [2, 0], CHAT)
    assert [prompt.tools for prompt in prompts] == [[TOOL]] * 2
    assert prompts[0].row["messages"] == chats[2]


def test_nulls_that_arrow_adds_go(tmp_path: Path) -> None:
    """Bug: the student learns to write keys of other rows' calls."""
    chats = [conversation({"city": "Bern"}), conversation({"unit": "K"})]
    documents = load_documents(parquet(tmp_path, pa.table({"messages": chats})), chat_layout("messages", None), key="k")
    calls = [document.messages[1]["tool_calls"][0] for document in read_documents(documents, [0, 1])]  # type: ignore[union-attr]
    assert [call["function"]["arguments"] for call in calls] == [{"city": "Bern"}, {"unit": "K"}]


@pytest.mark.parametrize(
    ("answers", "written"),
    [
        (["2024-01-01", "2023-05-06"], ["2024-01-01", "2023-05-06"]),
        ([LARGE, 1, 2.0], [str(LARGE), "1", "2"]),
        ([2**63 - 1, -(2**63)], [str(2**63 - 1), str(-(2**63))]),
        ([1, 0.5], ["1", "0.5"]),
        ([["a"], []], ['["a"]', "[]"]),
        ([None, "a"], [None, "a"]),
    ],
)
def test_answers_stay(tmp_path: Path, answers: list[Any], written: list[str | None]) -> None:
    """Bugs: dates are refused for their type; large integers are rounded."""
    source = jsonl(tmp_path, [{"text": "q", "answer": answer} for answer in answers])
    layout = text_layout("text").with_prompts("answer")
    require_suitable(source, layout, key="data.train")
    documents = load_documents(source, layout, key="data.train")
    assert [prompt.answer for prompt in read_prompts(documents, range(len(answers)))] == written


def test_whole_rows_have_what_was_written(tmp_path: Path) -> None:
    """Bugs: a reward reads objects with keys of other rows; a large integer in an object ends the run."""
    rows = [
        {"text": "a", "tests": {"x": LARGE, "none": None}, "day": "2024-01-01", "n": 1, "ok": True},
        {"text": "b", "tests": [1, "a"], "day": "2024-01-02", "n": 2, "late": "z"},
    ]
    layout = replace(text_layout("text"), whole_rows=True)
    documents = load_documents(jsonl(tmp_path, rows), layout, key="data.train")
    first, second = (prompt.row for prompt in read_prompts(documents, [0, 1], layout))
    assert first == {**rows[0], "late": None}
    assert second == {**rows[1], "ok": None}


def test_types_of_columns() -> None:
    """Bug: a column gets a type that its values do not have."""
    columns: dict[str, tuple[list[Any], pa.DataType]] = {
        "nothing": ([None, None], pa.null()),
        "bool": ([True, None], pa.bool_()),
        "mixed": ([True, 1], pa.json_()),
        "text": (["a", None], pa.string()),
        "texts": ([["a"], []], pa.list_(pa.string())),
        "objects": ([[], [{}]], pa.json_()),
        "numbers": ([1, 1.5], pa.float64()),
        "large": ([1, 2**63], pa.string()),
        "large_or_text": (["1", 2**63], pa.json_()),
    }
    rows = [{name: values[i] for name, (values, _) in columns.items()} for i in range(2)]
    assert column_types(rows) == {name: dtype for name, (_, dtype) in columns.items()}
    assert column_types([{}, {"a": 1}]) == {"a": pa.int64()}


def test_a_file_that_is_one_json_list(tmp_path: Path) -> None:
    """Bug: the message names a line, although the file is one JSON list."""
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a"}, {"text": "b"}, {"text": 1}], indent=1))
    source = Source(jsonl_files=str(tmp_path / "a.json"))
    with pytest.raises(DataError, match=r"a\.json': element 3 is malformed: 'text' is not a string but 1"):
        load_documents(source, text_layout("text"), key="data.train")
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a"}, {"text": None}], indent=1))
    with pytest.raises(DataError, match=r"the first in row 1 \(counted from 0 over all files: element 2 of "):
        load_documents(source, text_layout("text"), key="data.train")
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a"}, {"text": "b"}], indent=1))
    assert load_documents(source, text_layout("text"), key="data.train")["text"][:] == ["a", "b"]


def test_documents_of_another_order_of_keys_are_other_documents() -> None:
    """Bug: one cached sample for two conversations whose arguments a template writes in different orders."""
    first, second = ([{"role": "user", "content": "Hi", "x": x}] for x in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert _key_of(Conversation(first)) != _key_of(Conversation(second))


def test_rows_that_are_no_dataset() -> None:
    """Bug: a trainer's rows keep nulls that Arrow added to messages, or lose nulls of other columns."""

    class Rows:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, indices: list[int]) -> dict[str, list[Any]]:
            return {"messages": [[{"role": "user", "name": None}]], "row.x": [{"a": None}]}

    assert read_rows(Rows(), [0]) == {"messages": [[{"role": "user"}]], "row.x": [{"a": None}]}
