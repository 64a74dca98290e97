"""Damaged and hostile files are refused before a run, in one line with file and row; unusual ones are read."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_opd.config.data import Source, ValidationSource
from nemo_opd.data import dataset_files
from nemo_opd.data import lines as source_lines
from nemo_opd.data.columns import Layout, chat_layout, text_layout
from nemo_opd.data.document_sources import load_documents
from nemo_opd.data.lines import depth
from nemo_opd.data.loader import SampleSource
from nemo_opd.data.row_types import read_documents
from nemo_opd.data.source_files import require_suitable
from nemo_opd.errors import DataError
from tests.data.test_sources import KINDS, Write, table, write_file, write_parquet, write_stream

TEXT, CHAT = text_layout("text"), chat_layout("chat", None)
GOOD = b'{"text": "abc"}\n'
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


@pytest.fixture(autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf_cache"))
    monkeypatch.setenv("NEMO_OPD_CACHE", str(tmp_path_factory.mktemp("cache")))


def load(source: Source, layout: Layout = TEXT) -> datasets.Dataset:
    """Check and load a source as a run does."""
    require_suitable(source, layout, key="data.train")
    return load_documents(source, layout, key="data.train")


def refusal(source: Source, layout: Layout = TEXT) -> str:
    with pytest.raises(DataError) as caught:
        load(source, layout)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def strings(offsets: list[int], data: bytes) -> pa.Array:
    """Return an array of strings without any validation of offsets and bytes."""
    starts = b"".join(offset.to_bytes(4, "little", signed=True) for offset in offsets)
    return pa.Array.from_buffers(pa.string(), len(offsets) - 1, [None, pa.py_buffer(starts), pa.py_buffer(data)])


BAD_STRINGS = [
    pytest.param(strings([0, 2**31 - 1, 2, 3], b"abc"), 1000, "out of bounds: 2147483647 > 3", id="offset"),
    pytest.param(strings([0, 2, 1, 3], b"abc"), 1001, "non-monotonic offset", id="order"),
    pytest.param(strings([0, 2, 4], b"ab\xff\xfe"), 1001, "Invalid UTF8", id="utf8"),
]


@pytest.mark.parametrize("write", [write_stream, write_file])
@pytest.mark.parametrize(("bad", "row", "reason"), BAD_STRINGS)
def test_arrow_strings(tmp_path: Path, write: Write, bad: pa.Array, row: int, reason: str) -> None:
    """Bugs: a mapped offset out of range was a SIGBUS at a later step; a row number relative to its batch."""
    good = pa.table({"text": ["x"] * 10})
    rows = pa.Table.from_arrays([pa.chunked_array([pa.array(["x"] * 1000), bad])], names=["text"])
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as sink:
        new = pa.ipc.new_stream if write is write_stream else pa.ipc.new_file
        with new(sink, rows.schema) as writer:
            writer.write_table(rows)
    write(tmp_path / "a.arrow", good)
    message = refusal(Source(arrow_files=str(tmp_path / "*.arrow")))
    assert message.startswith(f"data.train.arrow_files={str(tmp_path / 'b.arrow')!r}: row {row} ")
    assert reason in message
    assert "write or download the file again" in message


def test_parquet_that_is_not_utf8(tmp_path: Path) -> None:
    """Bug: invalid UTF-8 is read, as Parquet's reader does not validate it."""
    write_parquet(tmp_path / "a.parquet", pa.table({"text": ["x"] * 7}))
    bad = pa.Table.from_arrays([strings([0, 2, 4], b"ab\xff\xfe")], names=["text"])
    write_parquet(tmp_path / "b.parquet", bad)
    message = refusal(Source(parquet_files=str(tmp_path / "*.parquet")))
    assert f"row 8 (counted from 0 over all files: row 1 of {str(tmp_path / 'b.parquet')!r})" in message
    assert "Invalid UTF8" in message


def deep(number: int) -> bytes:
    return b'{"text": "a", "x": ' + b"[" * number + b"]" * number + b"}\n"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "\xff\xfe abc"}\n', "byte 11 (0xff) is not UTF-8"),
        (b'{"text": "a\\ud800b"}\n', "half of a surrogate pair"),
        (b'{"text": "a\x00b"}\n', "Invalid control character"),
        (b'{"text": "a", "text": "b"}\n', "key 'text' occurs twice"),
        (deep(100_000), "more than 500 nested lists and objects"),
        (b'{"text": 5}\n', "'text' is not a string but 5"),
        (b'{"text": ["a"]}\n', "'text' is not a string but ['a']"),
        (b'{"text": "ab', "Unterminated string"),
        (b'{"text": "b"', "delimiter"),
        (b'["b"]', "not a JSON object"),
        (b"b", "Expecting value"),
    ],
)
@pytest.mark.parametrize(("pack", "number"), [(bytes, 3000), (gzip.compress, 3000), (bytes, 1)])
def test_a_line_of_jsonl(tmp_path: Path, line: bytes, reason: str, pack: Callable[[bytes], bytes], number: int) -> None:
    """Bugs: a bad byte was a bare UnicodeDecodeError; deep nesting crashed Python; blank lines were not counted.

    Good lines come first, which suffice to find the columns.
    """
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "b.jsonl").write_bytes(pack(GOOD * number + b"\n" + line))
    message = refusal(Source(jsonl_files=str(tmp_path / "*.jsonl")))
    assert message.startswith(f"data.train.jsonl_files={str(tmp_path / 'b.jsonl')!r}: line {number + 2} is malformed: ")
    assert reason in message
    assert message.endswith("write one JSON object a line, in UTF-8")


def test_a_first_line_that_is_too_deep(tmp_path: Path) -> None:
    """Bug: a stack overflow when the columns are inspected early."""
    (tmp_path / "a.jsonl").write_bytes(deep(100_000))
    assert "line 1 is malformed: it has more than 500" in refusal(Source(jsonl_files=str(tmp_path / "a.jsonl")))


def test_depth_is_of_lists_and_objects_outside_strings() -> None:
    assert depth(b'{"a": [[{"b": "[[[[{{{\\"[[["}], [1]]}') == 4
    assert depth(b'"[" "\\\\" [ "]" ]') == 1
    assert depth(b"[]" * 10_000) == 1


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"\xef\xbb\xbf" + GOOD * 2, ["abc"] * 2),
        (GOOD.replace(b"\n", b"\r\n") * 2, ["abc"] * 2),
        (b'{"text": "a\\u0000b"}\n', ["a\0b"]),
        (b'{"text": "\\ud83d\\ude00"}', ["\U0001f600"]),
        (deep(50), ["a"]),
        (b'{"text": "' + b"ab " * 5_000_000 + b'"}\n' + GOOD, ["ab " * 5_000_000, "abc"]),
        (b'{"text": "a", "x": 1}\n{"text": "b", "x": {"y": 2}}\n', ["a", "b"]),
    ],
    ids=["bom", "crlf", "nul", "pair", "deep", "long", "other_columns"],
)
def test_unusual_jsonl_is_read(tmp_path: Path, content: bytes, texts: list[str]) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    assert load(Source(jsonl_files=str(tmp_path / "a.jsonl")))["text"][:] == texts


def test_rows_without_text_name_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD * 2)
    (tmp_path / "b.jsonl").write_bytes(b"\n" + GOOD + b'\n{"text": null}\n')
    message = refusal(Source(jsonl_files=str(tmp_path / "*.jsonl")))
    place = f"row 3 (counted from 0 over all files: line 4 of {str(tmp_path / 'b.jsonl')!r})"
    assert f"1 of 4 documents have no text (null), the first in {place}; leave those rows out" in message


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


PACKERS = [("gz", gzip.compress), ("zst", zstd), ("bz2", bz2.compress), ("xz", lzma.compress)]


@pytest.mark.parametrize(("suffix", "pack"), PACKERS)
def test_compressed_lines(tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    """Catches a second part that is skipped, recognition by name, and damaged or replaced files that go unnoticed."""
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(pack(GOOD * 20) + pack(b'{"text": "z"}\n'))
    assert load(Source(jsonl_files=str(path)))["text"][:] == ["abc"] * 20 + ["z"]
    (tmp_path / "b.jsonl").write_bytes(pack(b'{"text": "named otherwise"}\n'))
    assert load(Source(jsonl_files=str(tmp_path / "b.jsonl")))["text"][:] == ["named otherwise"]
    path.write_bytes(pack(b'{"text": "other"}\n'))
    assert load(Source(jsonl_files=str(path)))["text"][:] == ["other"]
    content = pack(b"".join(b'{"text": "%d"}\n' % (i * i) for i in range(3000)))
    for damaged in (content[: len(content) // 2], content + b"and more"):
        path.write_bytes(damaged)
        message = refusal(Source(jsonl_files=str(path)))
        assert f"data.train.jsonl_files={str(path)!r} cannot be read: " in message
        assert "check that it is complete" in message


@pytest.mark.parametrize(("suffix", "pack"), PACKERS)
def test_bombs_are_bounded(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a small file that fills the disk."""
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(pack(b'{"text": "' + b"a" * 20_000_000 + b'"}\n'))
    monkeypatch.setattr(source_lines, "UNSUSPICIOUS", 1 << 20)
    message = refusal(Source(jsonl_files=str(path)))
    assert "unpacks to more than 0.0 GB, 200 times its size" in message


ENCODINGS = [
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.large_string()),
]


@pytest.mark.parametrize(("kind", "write", "suffix"), KINDS[:3])
@pytest.mark.parametrize("dtype", ENCODINGS, ids=str)
def test_every_encoding_of_text(tmp_path: Path, kind: str, write: Write, suffix: str, dtype: pa.DataType) -> None:
    """Catches an encoding that is refused in the text's column, or in a column that is not read."""
    texts = pa.array(["a", "zwei", "a"]).cast(dtype)
    write(tmp_path / f"a{suffix}", pa.table({"text": texts, "other": texts}))
    documents = load(Source(**{kind: str(tmp_path / f"a{suffix}")}))
    assert documents["text"][:] == ["a", "zwei", "a"]
    assert documents.column_names == ["text"]


def test_a_column_that_is_there_twice(tmp_path: Path) -> None:
    """Bug: a bare KeyError."""
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array([1])], names=["text", "text"])
    write_stream(tmp_path / "a.arrow", twice)
    assert "has 2 columns 'text'" in refusal(Source(arrow_files=str(tmp_path / "a.arrow")))


def write_chats(path: Path, chats: list[Any]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"chat": chat}) + "\n" for chat in chats))
    else:
        pq.write_table(pa.table({"chat": [json.dumps(chat) for chat in chats]}), path)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        ([], "without messages"),
        ([{"content": "no role"}], "not a mapping with a role"),
        ([{"role": 1, "content": "x"}], "not a mapping with a role"),
        ([{"role": "user", "content": 1}], "content is 1"),
        ({"role": "user"}, "conversation"),
        ("{", "conversation"),
        ([{"role": "user", "content": "\ud800"}], "half of a surrogate pair"),
    ],
)
def test_a_malformed_conversation_names_its_row(tmp_path: Path, suffix: str, chat: Any, reason: str) -> None:
    path = tmp_path / f"a.{suffix}"
    write_chats(path, [TURNS, TURNS, chat])
    message = refusal(Source(**{f"{suffix}_files": str(path)}), CHAT)
    assert reason in message
    assert ("line 3 " if suffix == "jsonl" else f"row 2 of {str(path)!r}") in message


def test_conversations_whose_messages_differ_in_keys(tmp_path: Path) -> None:
    """Bug: the column is refused because `datasets` stores such messages as JSON."""
    called = [*TURNS, {"role": "tool", "content": "4", "name": "f"}]
    called[1] = TURNS[1] | {"tool_calls": [{"function": {"name": "f", "arguments": {"a": 2}}}]}
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, TURNS[1]]
    write_chats(tmp_path / "a.jsonl", [TURNS, called, parts])
    documents = load(Source(jsonl_files=str(tmp_path / "a.jsonl")), CHAT)
    assert [document.messages for document in read_documents(documents, [0, 1, 2])] == [TURNS, called, parts]  # type: ignore[union-attr]


@pytest.mark.parametrize(("kind", "write", "suffix"), KINDS)
def test_a_column_of_texts_is_no_conversation(tmp_path: Path, kind: str, write: Write, suffix: str) -> None:
    """Bug: a bare JSON error that does not name the column."""
    write(tmp_path / f"a{suffix}", table(["hello", "[1]"], "chat"))
    with pytest.raises(DataError, match=r"column 'chat' holds no conversations; its first row is 'hello'…"):
        load(Source(**{kind: str(tmp_path / f"a{suffix}")}), CHAT)


@pytest.mark.parametrize("damage", ["cut", "overwritten"])
def test_a_damaged_conversion_is_made_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """Bugs: the message called the user's file incomplete; the damaged text was used."""
    (tmp_path / "a.jsonl").write_bytes(GOOD * 50)
    source = Source(jsonl_files=str(tmp_path / "a.jsonl"))
    (cached,) = (Path(file["filename"]) for file in load(source).cache_files)
    content = cached.read_bytes()
    cached.write_bytes(content[: len(content) // 2] if damage == "cut" else content.replace(b"abc", b"\xff\xfe\xfd"))
    assert load(source)["text"][:] == ["abc"] * 50
    assert "is converted again" in caplog.text


def test_the_loader_names_the_row(tmp_path: Path) -> None:
    """Bug: an error that first shows when the sample is made does not name the row."""

    def refuse(document: object) -> Any:
        raise DataError("no such token")

    write_stream(tmp_path / "a.arrow", table(["a"] * 9))
    source = SampleSource.of(load(Source(arrow_files=str(tmp_path / "a.arrow"))), refuse)
    with pytest.raises(DataError, match=r"row 7 \(counted from 0 over all files\) cannot be used: no such token"):
        source.__getitems__([7])


def test_a_file_that_is_cut_under_the_run(tmp_path: Path) -> None:
    """Bugs: reading behind the new end is a SIGBUS; rows of other files are refused, too."""
    rows = table(["some text"] * 50_000)
    for name in ("a", "b"):
        with pa.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as sink, pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
    documents = load(ValidationSource(arrow_files=str(tmp_path / "*.arrow"), max_samples=99_000))
    source = SampleSource.of(documents, str)  # type: ignore[arg-type]
    (tmp_path / "b.arrow").open("r+b").truncate(100_000)
    assert source.__getitems__([49_999]) == ["some text"]
    with pytest.raises(DataError, match=r"b.arrow was changed while the run reads it: it has 100000 bytes, and had"):
        source.__getitems__([98_000])


def test_a_file_that_is_replaced_under_the_run_stays_as_it_was(tmp_path: Path) -> None:
    write_stream(tmp_path / "a.arrow", table(["old"] * 9))
    source = SampleSource.of(load(Source(arrow_files=str(tmp_path / "a.arrow"))), str)  # type: ignore[arg-type]
    write_stream(tmp_path / "new.arrow", table(["new"]))
    (tmp_path / "new.arrow").rename(tmp_path / "a.arrow")
    assert source.__getitems__([8]) == ["old"]
    (tmp_path / "a.arrow").unlink()
    assert source.__getitems__([8]) == ["old"]


def test_a_file_that_is_changed_in_place_is_checked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.arrow"
    write_stream(path, table(["old"] * 9))
    source = SampleSource.of(load(Source(arrow_files=str(path))), str)  # type: ignore[arg-type]

    def put(old: bytes, new: bytes) -> None:
        content = path.read_bytes().replace(old, new)
        with path.open("r+b") as file:
            file.write(content)

    put(b"old", b"new")
    assert source.__getitems__([8]) == ["new"]
    assert "its new content is used from here on" in caplog.text
    put(b"new", b"\xff\xfe\xfd")
    with pytest.raises(DataError, match="was changed while the run reads it, and is damaged now: Invalid UTF8"):
        source.__getitems__([8])


@pytest.mark.parametrize("description", ["", '{"dataset_size": 1, "spl', "[]"])
def test_a_damaged_description_of_a_conversion_is_no_fault_of_the_file(
    description: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: every later run reported that the user's intact file could not be read."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(GOOD * 3)
    source = Source(jsonl_files=(str(file),))
    load(source)
    (info,) = Path(datasets.config.HF_DATASETS_CACHE).rglob("dataset_info.json")
    info.write_text(description)
    assert len(load(source)) == 3
    assert f"{info} is damaged; its data is converted again" in caplog.text


def test_conversions_of_another_process_stay(tmp_path: Path) -> None:
    being_made = Path(datasets.config.HF_DATASETS_CACHE) / "json" / "a" / "0.0.0.incomplete"
    unreadable = being_made.with_name("b") / "dataset_info.json"
    for folder in (being_made, unreadable):
        folder.mkdir(parents=True)
    (being_made / "dataset_info.json").touch()
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"{")
    refusal(Source(jsonl_files=(str(file),)))
    assert not dataset_files._forget_damaged("json")
    assert being_made.exists()
