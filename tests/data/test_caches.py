"""A data cache that cannot be written, or that another process writes: one line that does not blame the user's file."""

import errno
import fcntl
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest

from nemo_opd import files
from nemo_opd.config.data import HubDataset, Source
from nemo_opd.data import dataset_files, source_files
from nemo_opd.data.columns import text_layout
from nemo_opd.data.document_sources import load_documents
from nemo_opd.errors import StorageError
from tests.data.test_sources import KINDS, Write, table, write_parquet
from tests.full_disk import largest_file

LINES = b'{"text": "%s"}\n' % (b"abc" * 99) * 50


@pytest.fixture(autouse=True)
def conversions(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    home: Path = tmp_path_factory.mktemp("hf")
    monkeypatch.setattr(datasets.config, "HF_CACHE_HOME", home)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
    monkeypatch.setenv("NEMO_OPD_CACHE", str(tmp_path_factory.mktemp("cache")))
    return home / "datasets"


@pytest.fixture
def lines(tmp_path: Path) -> Source:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    return Source(jsonl_files=str(tmp_path / "a.jsonl"))


@pytest.fixture
def small_files() -> Iterator[None]:
    """Limit files to 4 kB, so that writes fail as on a full disk."""
    with largest_file(4096):
        yield


def load(source: Source) -> datasets.Dataset:
    return load_documents(source, text_layout("text"), key="data.train")


def test_conversions_that_cannot_be_kept(
    lines: Source, tmp_path: Path, conversions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the message called the user's file incomplete. A file in the folder's place makes the folder unwritable."""
    (tmp_path / "taken").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "taken" / "below")
    with pytest.raises(StorageError, match=r"taken/below could not be written \(.*\); set \$HF_DATASETS_CACHE to anot"):
        load(lines)


def test_a_full_disk_under_conversions(lines: Source, conversions: Path, small_files: None) -> None:
    """Bug: Arrow's error is hidden behind two errors of `datasets`."""
    expected = (
        rf"{conversions} could not be written \(File too large\); .* or set \$HF_DATASETS_CACHE to another folder"
    )
    with pytest.raises(StorageError, match=expected):
        load(lines)


def test_a_disk_without_a_byte(lines: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: not recognised, as `datasets` raises an OSError without errno."""
    monkeypatch.setattr(files, "free_bytes", lambda path: 0)
    with pytest.raises(StorageError, match=r"no room for the converted data .* or set \$HF_DATASETS_CACHE to another"):
        load(lines)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_errors_of_the_user_s_file_are_not_of_the_cache(tmp_path: Path, number: int) -> None:
    with pytest.raises(OSError, match="theirs") as caught, source_files.writing(tmp_path / "cache", "X"):
        raise OSError(number, "theirs", str(tmp_path / "a.parquet"))
    assert not isinstance(caught.value, StorageError)


def held(lines: Source, conversions: Path) -> Any:
    """Lock the conversion as another process would, and return the lock's file."""
    load(lines)
    (lock,) = conversions.rglob("*_builder.lock")
    file = lock.open("r+")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def test_another_process_is_waited_for(
    lines: Source, conversions: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: the run waited silently."""
    file = held(lines, conversions)
    monkeypatch.setattr(source_files.time, "sleep", lambda seconds: file.close())
    with caplog.at_level(logging.WARNING):
        assert len(load(lines)) == 50
    assert [f"it holds {file.name}" in message for message in caplog.messages] == [True]


def test_another_process_is_not_waited_for_without_end(
    lines: Source, conversions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_files, "WAIT_S", -1.0)
    with held(lines, conversions) as file, pytest.raises(StorageError) as caught:
        load(lines)
    assert f"{file.name} for more than" in str(caught.value)
    assert "end it, or set $HF_DATASETS_CACHE to another folder" in str(caught.value)


def test_a_damaged_description_of_a_dataset_of_the_hub(
    tmp_path: Path, conversions: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: every later run failed with advice to check the path and the network."""
    write_parquet(tmp_path / "train.parquet", table(["a", "b"]))
    source = Source(hub=HubDataset(path=str(tmp_path)))
    load(source)
    (info,) = conversions.rglob("dataset_info.json")
    info.write_text('{"spl')
    assert len(load(source)) == 2
    assert f"{info} is damaged" in caplog.text


def write_dictionary(path: Path, rows: pa.Table) -> None:
    encoded = rows.set_column(0, "text", rows["text"].dictionary_encode())
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, encoded.schema) as writer:
        writer.write_table(encoded)


def write_text(path: Path, rows: pa.Table) -> None:
    path.write_text("\n".join(rows["text"].to_pylist()))


@pytest.mark.parametrize(
    ("kind", "write", "suffix"),
    [
        *KINDS,
        pytest.param("arrow_files", write_dictionary, ".arrow", id="arrow_dictionary"),
        pytest.param("text_files", write_text, ".txt", id="text"),
    ],
)
def test_each_byte_is_validated_once_when_a_run_starts(
    tmp_path: Path, kind: str, write: Write, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: bytes were validated twice, and converted Arrow files three times; each pass reads all of the data."""
    write(tmp_path / f"a{suffix}", table(["abc"] * 5))
    source = Source(**{kind: str(tmp_path / f"a{suffix}")})
    rows = len(load(source))
    validated: list[int] = []
    monkeypatch.setattr(dataset_files, "problem", lambda values: validated.append(len(values)))
    load(source)
    assert sum(validated) == rows
