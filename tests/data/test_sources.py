"""Every kind of source, and every way to be unusable. The oracle is the content that the test wrote."""

import json
import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfApi

from nemo_opd.config.data import HubDataset, Source, ValidationSource
from nemo_opd.data.columns import Layout, chat_layout, text_layout
from nemo_opd.data.dataset_files import Read, convert, selected
from nemo_opd.data.document_sources import READERS, load_documents
from nemo_opd.data.lines import of_rows
from nemo_opd.data.row_types import Conversation, read_documents
from nemo_opd.data.source_files import require_suitable
from nemo_opd.errors import DataError
from nemo_opd.training import saving
from tests.composition import compose

TEXTS = ["one", "zwei", "三", ""]


@pytest.fixture(autouse=True)
def _cache_of_datasets(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf_cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a user's folder, and check at the end that only the test wrote to it."""
    yield tmp_path
    suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert suffixes <= {".arrow", ".parquet", ".jsonl", ".txt", ".gz"}, "something was written beside the user's files"
    assert not list(tmp_path.rglob("cache-*"))


def table(texts: Sequence[str | None], column: str = "text") -> pa.Table:
    return pa.table({column: pa.array(texts, pa.string()), "n": range(len(texts))})


def write_stream(path: Path, rows: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=2)


def write_file(path: Path, rows: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=2)


def write_parquet(path: Path, rows: pa.Table) -> None:
    pq.write_table(rows, path)


def write_jsonl(path: Path, rows: pa.Table) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.to_pylist()))


KINDS = [
    pytest.param("arrow_files", write_stream, ".arrow", id="arrow_stream"),
    pytest.param("arrow_files", write_file, ".arrow", id="arrow_file"),
    pytest.param("parquet_files", write_parquet, ".parquet", id="parquet"),
    pytest.param("jsonl_files", write_jsonl, ".jsonl", id="jsonl"),
]
Write = Callable[[Path, pa.Table], None]


def load(source: Source, text_key: str = "text") -> list[str]:
    return load_documents(source, text_layout(text_key), key="data.train")["text"][:]


def refusal(source: Source, text_key: str = "text") -> str:
    with pytest.raises(DataError) as caught:
        load_documents(source, text_layout(text_key), key="data.train")
    return str(caught.value)


@pytest.mark.parametrize(("kind", "write", "suffix"), KINDS)
def test_path_list_and_glob(folder: Path, kind: str, write: Write, suffix: str) -> None:
    """Catches a changed order: files as listed, matches of a glob sorted and at any depth, rows as in their file."""
    (folder / "b" / "deep").mkdir(parents=True)
    names = [folder / f"z{suffix}", folder / "b" / f"y{suffix}", folder / "b" / "deep" / f"x{suffix}"]
    for i, name in enumerate(names):
        write(name, table([f"{text}{i}" for text in TEXTS]))
    z, y, x = ([f"{text}{i}" for text in TEXTS] for i in range(3))
    assert load(Source(**{kind: str(names[0])})) == z
    assert load(Source(**{kind: [str(names[1]), str(names[0])]})) == y + z
    assert load(Source(**{kind: str(folder / "**" / f"*{suffix}")})) == x + y + z
    assert load(Source(**{kind: [str(folder / f"*{suffix}"), str(folder / "b" / f"?{suffix}")]})) == z + y


@pytest.mark.parametrize(("kind", "write", "suffix"), KINDS)
def test_only_the_text_column_is_kept_under_one_name(folder: Path, kind: str, write: Write, suffix: str) -> None:
    write(folder / f"a{suffix}", table(TEXTS, "content"))
    documents = load_documents(Source(**{kind: str(folder / f"a{suffix}")}), text_layout("content"), key="data.train")
    assert documents.column_names == ["text"]
    assert documents[[2, 0]] == {"text": ["三", "one"]}


@pytest.mark.parametrize(("kind", "write", "suffix"), KINDS)
def test_a_pickled_copy_maps_the_file_instead_of_carrying_it(
    folder: Path, kind: str, write: Write, suffix: str
) -> None:
    """Bug: workers get the dataset by pickle, and all of its text with it, also after max_samples."""
    write(folder / f"a{suffix}", table([f"{i:01000d}" for i in range(1_000)]))
    source = ValidationSource(**{kind: str(folder / f"a{suffix}")}, max_samples=900)
    pickled = pickle.dumps(load_documents(source, text_layout("text"), key="data.validation"))
    assert len(pickled) < 20_000
    assert pickle.loads(pickled)[899]["text"] == f"{899:01000d}"


def test_a_stream_may_have_other_columns_of_any_type(folder: Path) -> None:
    """Bug: a map or a UUID beside the text made the file unusable, as `datasets` lacks these types."""
    texts = ["one", "two"]
    columns = {
        "map": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
        "uuid": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16)] * 2, pa.binary(16))),
        "nested": pa.array([{"m": [("a", 1)]}] * 2, pa.struct([("m", pa.map_(pa.string(), pa.int64()))])),
    }
    for name, column in columns.items():
        write_stream(folder / f"{name}.arrow", pa.table({"text": texts, name: column, "id": [1, 2]}))
        assert load(Source(arrow_files=(str(folder / f"{name}.arrow"),))) == texts
    write_stream(folder / "all.arrow", pa.table({"text": texts, **columns}))
    paths = tuple(str(folder / f"{name}.arrow") for name in ("map", "uuid", "all"))
    documents = load_documents(Source(arrow_files=paths), text_layout("text"), key="data.train")
    assert pickle.loads(pickle.dumps(documents))["text"][:] == texts * 3
    write_file(folder / "file.arrow", pa.table({"text": texts, "map": columns["map"]}))
    assert "columns 'map'" in refusal(Source(arrow_files=(str(folder / "file.arrow"),)))


def test_stream_and_file_format_in_one_list(folder: Path) -> None:
    write_stream(folder / "a.arrow", table(["a"]))
    write_file(folder / "b.arrow", table(["b"]))
    assert load(Source(arrow_files=str(folder / "*.arrow"))) == ["a", "b"]


def test_a_path_with_glob_characters_is_a_path_first(folder: Path) -> None:
    for name in ("a[1].parquet", "a1.parquet"):
        write_parquet(folder / name, table([name]))
    assert load(Source(parquet_files=str(folder / "a[1].parquet"))) == ["a[1].parquet"]


def test_each_text_file_is_a_document_whatever_the_text_key(folder: Path) -> None:
    (folder / "a.txt").write_text("one\n\ntwo\n")
    (folder / "b.txt").write_text("三")
    source = Source(text_files=[str(folder / "b.txt"), str(folder / "a.txt")])
    assert load(source, "content") == ["三", "one\n\ntwo\n"]


def test_a_data_set_of_the_hub_is_read_at_the_commit_that_is_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a run on a data set that changed later could not be repeated."""
    write_parquet(folder / "train.parquet", table(TEXTS))
    builder_of, revisions = datasets.load_dataset_builder, []

    def build_from_folder(path: str, name: str | None, *, revision: str | None) -> datasets.DatasetBuilder:
        revisions.append((path, revision))
        builder = builder_of(str(folder))
        monkeypatch.setattr(builder, "base_path", folder.as_posix())
        return builder

    info = {"some/texts": {None: "a" * 40, "v1": "b" * 40}}
    monkeypatch.setattr(datasets, "load_dataset_builder", build_from_folder)
    monkeypatch.setattr(
        HfApi, "dataset_info", lambda _, path, revision, timeout: SimpleNamespace(sha=info[path][revision])
    )
    config = compose(
        "data.train.arrow_files=[]",
        "data.train.hub.path=some/texts",
        "data.validation.arrow_files=[]",
        "data.validation.hub={path:some/texts,revision:v1}",
    )
    assert config.data.validation is not None
    for source in (config.data.train, config.data.validation):
        assert load(source) == TEXTS

    assert revisions == [("some/texts", "a" * 40), ("some/texts", "b" * 40)]
    assert saving._data_commits(config) == {"data.train.hub": "a" * 40, "data.validation.hub": "b" * 40}


@pytest.mark.parametrize(
    "name", ["SECRET", "../secret.txt", "file://SECRET", "http://127.0.0.1:1/x", "/usr/**", "zip://a::b"]
)
def test_a_card_names_no_files_outside_of_its_data_set(name: str, tmp_path: Path) -> None:
    """Bug: a stranger's dataset turns any file of the user into training text."""
    secret, folder = tmp_path / "secret.txt", tmp_path / "texts"
    secret.write_text("secret")
    folder.mkdir()
    pattern = name.replace("SECRET", str(secret))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {pattern}\n---\n")
    assert ", outside of it; leave that out" in refusal(Source(hub=HubDataset(path=str(folder))))


def test_hub_reads_a_local_folder(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    write_parquet(tmp_path / "train.parquet", table(TEXTS))
    (folder / "train.parquet").symlink_to(tmp_path / "train.parquet")
    assert load(Source(hub=HubDataset(path=str(folder)))) == TEXTS
    message = refusal(Source(hub=HubDataset(path=str(folder), split="nope")))
    assert "data.train.hub" in message
    assert "nope" in message


def test_demo_documents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEMO_OPD_CACHE", str(tmp_path))
    source = ValidationSource(arrow_files="demo:validation", max_samples=3)
    assert len(load_documents(source, text_layout("text"), key="data.validation")) == 3
    assert "use demo:train, demo:validation, demo:arithmetic_train or" in refusal(Source(arrow_files="demo:test"))
    assert "put 'demo:train' under arrow_files" in refusal(Source(jsonl_files="demo:train"))


def test_max_samples_beyond_the_end(folder: Path) -> None:
    write_stream(folder / "a.arrow", table(TEXTS))
    assert load(ValidationSource(arrow_files=str(folder / "a.arrow"), max_samples=99)) == TEXTS


def test_no_source() -> None:
    message = refusal(Source())
    assert message.startswith("data.train ")
    assert "data.train.arrow_files" in message


@pytest.mark.parametrize("kind", ["arrow_files", "parquet_files", "jsonl_files", "text_files"])
def test_missing_file_folder_and_empty_glob(folder: Path, kind: str) -> None:
    for entry, reason in (
        (folder / "gone.arrow", "does not exist"),
        (folder / "**" / "gone*", "matches no file"),
        (folder, "is a folder"),
    ):
        message = refusal(Source(**{kind: str(entry)}))
        assert f"data.train.{kind}={str(entry)!r} {reason}" in message
    assert f"relative to {Path.cwd()}" in refusal(Source(**{kind: "gone.arrow"}))


@pytest.mark.parametrize(("kind", "write", "suffix"), KINDS[:3])
def test_truncated_and_foreign_files(folder: Path, kind: str, write: Write, suffix: str) -> None:
    """Bug: a cut or foreign file is read in part, or is not named."""
    write(folder / f"good{suffix}", table(["x"] * 50))
    good = (folder / f"good{suffix}").read_bytes()
    bad = folder / f"bad{suffix}"
    for content in (b"", b"no such format" * 20, good[: len(good) // 2 + 3], good[: len(good) // 4 + 1]):
        bad.write_bytes(content)
        message = refusal(Source(**{kind: [str(folder / f"good{suffix}"), str(bad)]}))
        assert f"data.train.{kind}={str(bad)!r} cannot be read: " in message
        assert "check that it is complete" in message


def test_parquet_with_a_damaged_page(folder: Path) -> None:
    """Bug: only the footer is checked, which is intact here."""
    write_parquet(folder / "a.parquet", table(["x"] * 50))
    content = bytearray((folder / "a.parquet").read_bytes())
    content[4:60] = bytes(56)
    (folder / "a.parquet").write_bytes(content)
    assert "a.parquet' cannot be read: " in refusal(Source(parquet_files=str(folder / "a.parquet")))


def test_stream_cut_between_batches_is_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bug: such a file is a valid stream with fewer rows, and only its end mark is missing."""
    write_stream(folder / "a.arrow", table(TEXTS))
    with caplog.at_level(logging.WARNING):
        assert load(Source(arrow_files=str(folder / "a.arrow"))) == TEXTS
    assert not caplog.records
    (folder / "a.arrow").write_bytes((folder / "a.arrow").read_bytes()[:-8])
    with caplog.at_level(logging.WARNING):
        load(Source(arrow_files=str(folder / "a.arrow")))
    assert "no end mark" in caplog.text


def test_text_file_that_is_not_utf8(folder: Path) -> None:
    (folder / "a.txt").write_text("fine")
    (folder / "b.txt").write_bytes(b"\xff\xfe")
    message = refusal(Source(text_files=str(folder / "*.txt")))
    assert "b.txt': in line 1, byte 1 (0xff) is not UTF-8 (invalid start byte); convert the file to UTF-8" in message


@pytest.mark.parametrize(("kind", "write", "suffix"), KINDS)
def test_text_column_absent_or_of_another_type(folder: Path, kind: str, write: Write, suffix: str) -> None:
    write(folder / f"a{suffix}", table(TEXTS))
    source = Source(**{kind: str(folder / f"a{suffix}")})
    assert refusal(source, "body").endswith("has no column 'body'; set data.text_key to one of its columns: text")
    assert "column 'n' is of type int64, not string" in refusal(source, "n")


@pytest.mark.parametrize(("kind", "write", "suffix"), KINDS)
def test_nothing_to_train_on(folder: Path, kind: str, write: Write, suffix: str) -> None:
    cases: list[tuple[list[str | None], str]] = [
        (["", ""], "all 2 documents are empty"),
        ([], "no documents"),
        (["a", None, None], "2 of 3 documents have no text (null), the first in row 1"),
    ]
    for i, (texts, reason) in enumerate(cases):
        path = folder / f"a{i}{suffix}"
        write(path, table(texts))
        message = refusal(Source(**{kind: str(path)}))
        assert message.startswith(f"data.train.{kind}={str(path)!r}")
        assert reason in message


@pytest.mark.parametrize(("kind", "write", "suffix"), KINDS)
def test_a_file_without_rows_among_others(folder: Path, kind: str, write: Write, suffix: str) -> None:
    """Bug: an empty shard, common in filtered corpora, ends the run."""
    write(folder / f"a{suffix}", table([]))
    write(folder / f"b{suffix}", table(["b"]))
    assert load(Source(**{kind: str(folder / f"*{suffix}")})) == ["b"]


def test_arrow_files_with_different_types_of_text(folder: Path) -> None:
    write_stream(folder / "a.arrow", pa.table({"text": ["a"]}))
    write_stream(folder / "b.arrow", pa.table({"text": pa.array(["b"], pa.large_string())}))
    message = refusal(Source(arrow_files=str(folder / "*.arrow")))
    assert "string in " in message
    assert "large_string in " in message


CHATS = [
    [{"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "groß"}],
    [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
        {"role": "tool", "content": "4"},
    ],
]
TOOLS = [None, [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("kind", "write", "suffix"), KINDS)
def test_conversations(folder: Path, kind: str, write: Write, suffix: str, as_json: bool) -> None:
    """Catches messages with nulls that Arrow's columns of objects add."""
    if as_json:
        columns = {"chat": [json.dumps(chat) for chat in CHATS], "fns": [json.dumps(tools) for tools in TOOLS]}
    else:
        columns = {"chat": CHATS, "fns": TOOLS}
    if kind == "jsonl_files":  # a table would add nulls to the objects, which are then the file's own
        rows = ({name: values[i] for name, values in columns.items()} for i in range(2))
        (folder / f"a{suffix}").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        write(folder / f"a{suffix}", pa.table({**columns, "n": [0, 1]}))
    source = Source(**{kind: str(folder / f"a{suffix}")})
    documents = load_documents(source, chat_layout("chat", "fns"), key="data.train")
    assert read_documents(documents, [1, 0]) == [Conversation(CHATS[1], TOOLS[1]), Conversation(CHATS[0], TOOLS[0])]
    alone = load_documents(source, chat_layout("chat", None), key="data.train")
    assert read_documents(alone, [0]) == [Conversation(CHATS[0])]


@pytest.mark.parametrize(
    ("columns", "layout", "message"),
    [
        (
            {"text": ["x"]},
            chat_layout("chat", None),
            "set data.messages_key to one of its columns: text; for texts, set data.text_key",
        ),
        ({"chat": CHATS[:1]}, chat_layout("chat", "fns"), "has no column 'fns'; set data.tools_key to one of its"),
        ({"chat": [1]}, chat_layout("chat", None), "is of type int64, not a list of objects or its JSON text"),
        ({"chat": [["a"]]}, chat_layout("chat", None), "not a list of objects or its JSON text; set data.messages"),
        (
            {"chat": [None, CHATS[0]]},
            chat_layout("chat", None),
            "1 of 2 documents have no messages (null), the first",
        ),
    ],
)
def test_columns_that_hold_no_conversations(
    folder: Path, columns: dict[str, list[object]], layout: Layout, message: str
) -> None:
    pq.write_table(pa.table(columns), folder / "a.parquet")
    source = Source(parquet_files=str(folder / "a.parquet"))
    with pytest.raises(DataError) as caught:
        load_documents(source, layout, key="data.train")
    assert message in str(caught.value)


def test_a_format_needs_a_reader_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the checks before the loader refuse a new format with a KeyError."""

    def read(paths: list[Path], layout: Layout, key: str) -> Read:
        origin = of_rows(paths, [1])
        return selected(convert("csv", paths, list(layout.columns), key, origin), layout, key, *paths), origin

    monkeypatch.setitem(READERS, "csv_files", read)
    (tmp_path / "a.csv").write_text("body\nOnce\n")
    source = SimpleNamespace(given={"csv_files": (str(tmp_path / "a.csv"),)})

    require_suitable(source, text_layout("body"), key="data.train")
    assert load_documents(source, text_layout("body"), key="data.train")["text"][:] == ["Once"]
