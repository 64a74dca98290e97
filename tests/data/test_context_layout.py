"""Columns for teachers' contexts: found, checked and joined with another record's columns."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from nemo_opd.config.data import Data, Source
from nemo_opd.config.teacher import Context as ContextSettings
from nemo_opd.data.columns import Layout, document_layout
from nemo_opd.data.context import Context
from nemo_opd.data.document_sources import load_documents, with_others
from nemo_opd.data.rollouts import read_prompts
from nemo_opd.data.row_types import FIELD, OTHER, read_documents
from nemo_opd.data.source_files import require_suitable
from nemo_opd.errors import DataError

TEMPLATE = "teachers.0.context.template"
ROWS = [{"text": f"q{i}", "answer": i, "hint": f"h{i}", "found": [f"a{i}", "b"]} for i in range(5)]


def written(folder: Path, rows: list[dict[str, Any]]) -> Source:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Source(jsonl_files=(str(folder / "rows.jsonl"),))


def layout(*fields: str, setting: str = TEMPLATE) -> Layout:
    return document_layout(Data()).with_prompts("answer").with_fields([(field, setting) for field in fields])


def test_prompts_have_the_fields_of_their_record_and_of_another(tmp_path: Path) -> None:
    """Bug: fields of the wrong row. Of 5 rows, the other record is two rows on, modulo 5."""
    documents = load_documents(written(tmp_path, ROWS), layout("hint", "found", "answer"), key="data.train")
    joined = pickle.loads(pickle.dumps(with_others(documents, "data.train")))

    for i, prompt in zip([3, 0, 4], read_prompts(joined, [3, 0, 4]), strict=True):
        other_row = (i + 2) % 5
        assert (prompt.content, prompt.answer) == (f"q{i}", str(i))
        assert prompt.fields == {
            "answer": i,
            FIELD + "hint": f"h{i}",
            FIELD + "found": [f"a{i}", "b"],
            OTHER + "answer": other_row,
            OTHER + FIELD + "hint": f"h{other_row}",
            OTHER + FIELD + "found": [f"a{other_row}", "b"],
        }
    assert read_prompts(documents, [1])[0].fields == {
        "answer": 1,
        FIELD + "hint": "h1",
        FIELD + "found": ["a1", "b"],
    }


def test_an_answer_is_written_as_that_of_another_record(tmp_path: Path) -> None:
    """Bug: the record's list of answers was written as JSON, and the other record's one below the other."""
    answer_layout = document_layout(Data()).with_prompts("found").with_fields([("found", TEMPLATE)])
    documents = with_others(load_documents(written(tmp_path, ROWS), answer_layout, key="data.train"), "data.train")
    settings = ContextSettings(template="{found}", gap_every=1, contrast=True)
    context = Context(settings, answer_layout.columns, "teachers.0.context")
    (prompt,) = read_prompts(documents, [0])
    assert context.contents(prompt.content, prompt.fields) == ("a0\n\nb", "q0", "a2\n\nb")


def test_conversations_have_their_fields(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "q"}], "hint": f"h{i}"} for i in range(2)]
    chat = document_layout(Data(messages_key="messages")).with_fields([("hint", TEMPLATE)])
    documents = with_others(load_documents(written(tmp_path, rows), chat, key="data.train"), "data.train")
    first, second = read_documents(documents, [0, 1])
    assert getattr(first, "fields", None) == {FIELD + "hint": "h0", OTHER + FIELD + "hint": "h1"}
    assert getattr(second, "fields", None) == {FIELD + "hint": "h1", OTHER + FIELD + "hint": "h0"}


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        (ROWS, ["solution"], "has no column 'solution', which teachers.0.context.template names; write one of"),
        ([row | {"hint": {"a": 1}} for row in ROWS], ["hint"], "column 'hint' is of type JSON (objects, or values"),
        ([*ROWS[:2], ROWS[2] | {"hint": None}], ["hint"], "1 of 3 documents have no 'hint' (null), the first in"),
    ],
)
def test_columns_that_cannot_be_read(
    rows: list[dict[str, Any]], fields: list[str], message: str, tmp_path: Path
) -> None:
    """Bug: unusable columns fail in training, and not before it."""
    source, required = written(tmp_path, rows), layout(*fields)

    def check_and_load() -> None:
        require_suitable(source, required, key="data.train")
        load_documents(source, required, key="data.train")

    with pytest.raises(DataError) as caught:
        check_and_load()
    assert message in str(caught.value)


def test_a_column_is_what_each_setting_that_names_it_needs(tmp_path: Path) -> None:
    """Bug: a column of messages suits one teacher's `key`, but another teacher's template cannot write it."""
    source = written(tmp_path, [row | {"own": [{"role": "user", "content": "q"}]} for row in ROWS])
    settings = (TEMPLATE, "teachers.1.context.key")
    for named in (settings, settings[::-1]):
        both = document_layout(Data()).with_prompts("answer").with_fields([("own", setting) for setting in named])
        with pytest.raises(DataError, match=r"column 'own' is of type JSON .*, which teachers\.0\.context\.template "):
            require_suitable(source, both, key="data.train")


def test_one_record_has_no_other(tmp_path: Path) -> None:
    documents = load_documents(written(tmp_path, ROWS[:1]), layout("hint"), key="data.train")
    with pytest.raises(DataError, match=r"data.train has 1 record, but contrast=true"):
        with_others(documents, "data.train")
