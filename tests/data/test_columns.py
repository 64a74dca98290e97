"""Common row formats: columns that hold documents, and the conversations that they become."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest

from nemo_opd.alignment import ChatRenderer
from nemo_opd.config.data import Data
from nemo_opd.config.run import validated
from nemo_opd.data.columns import document_layout
from nemo_opd.data.document_sources import load_documents
from nemo_opd.data.rollouts import read_prompts
from nemo_opd.data.row_types import Conversation, read_documents
from nemo_opd.data.source_files import json_schema, require_suitable
from nemo_opd.errors import ConfigError, DataError
from nemo_opd.models.folder import read_template, template_setting
from nemo_opd.preflight.inputs import with_documents_columns
from tests.tokenizers_fixture import byte_level

HI = [{"role": "user", "content": "Hi"}]
HELLO = [{"role": "assistant", "content": "Hello"}]


@pytest.fixture(autouse=True)
def _cache_of_datasets(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf_cache"))


def write(folder: Path, rows: list[dict[str, Any]], kind: str) -> dict[str, str]:
    """Write rows to a file, and return the source's settings."""
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    return {f"{kind}_files": str(path)}


def conversations(source: dict[str, str], **keys: Any) -> list[list[dict[str, Any]]]:
    """Return the messages that a run reads; columns are detected unless `keys` name them."""
    settings = with_documents_columns({"data": {"train": source, **keys}})
    data = validated(settings["data"], Data)
    require_suitable(data.train, document_layout(data), key="data.train")
    documents = read_documents(rows := load_documents(data.train, document_layout(data), key="data.train"), [0, 1])
    assert len(rows) == len(documents)
    assert all(isinstance(document, Conversation) for document in documents)
    return [list(document.messages) for document in documents if isinstance(document, Conversation)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"instruction": "Hi", "input": "", "output": "Hello"}, HI + HELLO),
        ({"instruction": "Hi", "input": None, "output": "Hello"}, HI + HELLO),
        ({"instruction": "H", "input": "i", "output": "Hello"}, [{"role": "user", "content": "H\n\ni"}, *HELLO]),
        ({"prompt": "Hi", "completion": "Hello", "id": 3}, HI + HELLO),
        ({"question": "Hi", "answer": "Hello"}, HI + HELLO),
        ({"prompt": HI, "completion": HELLO}, HI + HELLO),
        ({"prompt": HI, "response": "Hello"}, HI + HELLO),
        ({"messages": HI + HELLO, "prompt": "Hi"}, HI + HELLO),
    ],
)
def test_columns_are_found_out(tmp_path: Path, kind: str, row: dict[str, Any], messages: Any) -> None:
    """Bugs: `has no column 'text'` for all common formats but one; an empty `input` in the user's message."""
    second_row = {key: value if isinstance(value, list) else f"{value}?" for key, value in row.items() if key != "id"}
    assert conversations(write(tmp_path, [row, second_row], kind))[0] == messages


def test_a_reward_keeps_its_answers(tmp_path: Path) -> None:
    """Bug: the reward's answers become the prompts' completions, and the run is refused."""
    source = write(tmp_path, [{"question": "Hi", "answer": "Hello"}], "jsonl")
    for reward in ({"type": "exact"}, {"type": "weighted", "rewards": {"a": {"reward": {"type": "exact"}}}}):
        sampled = {"data": {"train": source}, "rollout": {"type": "hf"}, "reward": reward}
        assert dict(with_documents_columns(sampled)["data"])["prompt_key"] == ("question",)
        assert "completion_key" not in with_documents_columns(sampled)["data"]


def test_questions_beside_messages_are_not_read(tmp_path: Path) -> None:
    """Bug: a file with both is refused as ambiguous."""
    source = write(tmp_path, [{"messages": [*HI, *HELLO], "question": "Hi", "answer": "Hello"}], "jsonl")
    assert dict(with_documents_columns({"data": {"train": source}})["data"])["messages_key"] == "messages"


def test_sharegpt(tmp_path: Path) -> None:
    """Bugs: `from` and `value` are refused; axolotl's `train` mark is lost."""
    chat = [{"from": "system", "value": "S"}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    (messages, _) = conversations(
        write(tmp_path, [{"conversations": [*chat[:2], {**chat[2], "train": False}]}] * 2, "jsonl")
    )
    render = ChatRenderer(_plain_tokenizer())
    assert not render(json.loads(messages) if isinstance(messages, str) else messages).assistant_mask.any()
    shared, usual = render(chat), render([{"role": "system", "content": "S"}, *HI, *HELLO])
    assert shared.ids.tolist() == usual.ids.tolist()
    assert shared.assistant_mask.any()


def test_sharegpt_with_an_unknown_speaker(tmp_path: Path) -> None:
    """Bug: a KeyError, or a turn under a role that no template has."""
    source = write(tmp_path, [{"conversations": [{"from": "narrator", "value": "Once"}]}] * 2, "jsonl")
    with pytest.raises(DataError, match=r"from 'narrator'; write one of system, human"):
        conversations(source)


def test_several_readings_are_a_question(tmp_path: Path) -> None:
    """Bug: the run guesses, for example trains silently on Alpaca's rendered `text`."""
    source = write(tmp_path, [{"text": "x", "instruction": "Hi", "output": "Hello"}] * 2, "jsonl")
    with pytest.raises(DataError) as caught:
        conversations(source)
    assert "data.text_key=text, or data.prompt_key=[instruction] data.completion_key=output" in str(caught.value)
    assert conversations(source, prompt_key=["instruction"], completion_key="output")[0] == HI + HELLO


def test_text_stays_text(tmp_path: Path) -> None:
    """Bug: a run on texts becomes a run on conversations."""
    source = write(tmp_path, [{"text": "x", "prompt": "p"}] * 2, "parquet")
    assert not validated(with_documents_columns({"data": {"train": source}})["data"], Data).is_chat


def test_other_names_are_named_in_the_error(tmp_path: Path) -> None:
    """Bug: no remedy in the error for a dataset of the hub, whose columns are not inspected beforehand."""
    path = write(tmp_path, [{"prompt": "Hi", "completion": "Hello"}] * 2, "jsonl")
    data = validated({"train": path, "text_key": "text"}, Data)
    with pytest.raises(DataError, match=r"or write data.prompt_key=\[prompt\] data.completion_key=completion"):
        require_suitable(data.train, document_layout(data), key="data.train")


def test_a_column_without_a_prompt(tmp_path: Path) -> None:
    """Bug: a row with a null prompt becomes an answer without a question."""
    rows: list[dict[str, Any]] = [{"prompt": "Hi", "completion": "Hello"}, {"prompt": None, "completion": "Hello"}]
    with pytest.raises(DataError, match=r"1 of 2 documents have no 'prompt' \(null\), the first in row 1"):
        conversations(write(tmp_path, rows, "jsonl"))


def test_prompts_of_a_run_that_samples(tmp_path: Path) -> None:
    """Bugs: the completion is in the prompt; a reward lacks the user's columns."""
    data = validated(
        {"train": write(tmp_path, [{"p": "Hi", "c": "Hello"}], "jsonl"), "prompt_key": "p", "completion_key": "c"}, Data
    )
    layout = document_layout(data)
    (prompt,) = read_prompts(load_documents(data.train, layout, key="data.train"), [0], layout)
    assert (prompt.content, prompt.response) == (HI, "Hello")
    assert prompt.row == {"p": "Hi", "c": "Hello"}


def test_prompts_alone_are_a_question_of_a_run_that_samples(tmp_path: Path) -> None:
    """Bugs: a column of prompts is refused for a missing `text`, or rendered as a message without being asked."""
    source = write(tmp_path, [{"prompt": "Hi", "answer": "Hello"}] * 2, "jsonl")
    with pytest.raises(DataError, match=r"write data\.text_key=prompt, or data\.prompt_key=\[prompt\]"):
        with_documents_columns({"data": {"train": source}, "rollout": {"type": "hf"}})
    assert "prompt_key" not in with_documents_columns({"data": {"train": source}})["data"]


def test_keys_that_exclude_each_other() -> None:
    """Bug: one of the settings is ignored."""
    for keys, words in (
        ({"completion_key": "c"}, "without prompt_key"),
        ({"prompt_key": "p", "messages_key": "m"}, "leave one of the two out"),
    ):
        with pytest.raises(ConfigError, match=words):
            validated(keys, Data)


def test_first_rows_of_a_file(tmp_path: Path) -> None:
    """Bug: a file whose rows differ in form, text and messages, is refused."""
    rows = [{"prompt": "Hi", "completion": "Hello"}, {"prompt": HI, "completion": HELLO}]
    source = write(tmp_path, rows, "jsonl")
    assert json_schema(tmp_path / "rows.jsonl") is not None
    assert conversations(source) == [HI + HELLO] * 2


def _plain_tokenizer() -> Any:
    tokenizer = deepcopy(byte_level())
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    tokenizer.chat_template = read_template("plain", key="student.chat_template")
    return tokenizer


def test_plain_template() -> None:
    """Bugs: no loss on the answer's end; a loss on a prompt."""
    tokenizer = _plain_tokenizer()
    tokens = ChatRenderer(tokenizer)([*HI, *HELLO, *HI])
    assert tokenizer.decode(tokens.ids) == "User:\nHi\n\nAssistant:\nHello<|end|>\n\nUser:\nHi\n\n"
    assert tokenizer.decode(tokens.ids[tokens.assistant_mask]) == "Hello<|end|>"


def test_template_of_a_models_folder(tmp_path: Path) -> None:
    """Bug: the suggested value is one that the setting does not accept."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert read_template(template_setting(str(tmp_path)), key="teachers.0.chat_template") == "{{ messages }}"
    (tmp_path / "chat_template.jinja").write_text("{{ 1 }}")
    assert read_template(str(tmp_path), key="teachers.0.chat_template") == "{{ 1 }}"
    assert template_setting("some/hub-name") == "plain"
