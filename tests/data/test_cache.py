"""Cached samples equal new ones, despite other writers, killed processes and damaged files."""

import multiprocessing
import os
import pickle
import signal
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path

import numpy as np
import pytest

from nemo_opd.data import sample_cache
from nemo_opd.data.row_types import Conversation, Document
from nemo_opd.data.sample_cache import CachedSampleMaker
from nemo_opd.data.samples import Chunks, Sample, TeacherSample, Tokens


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEMO_OPD_CACHE", str(tmp_path))
    return tmp_path / "samples"


def tokens(values: list[int]) -> Tokens:
    ids = np.array(values, np.int32)
    return Tokens(ids, ids % 2 == 0, ids % 5)


@dataclass
class Maker:
    """Records its documents; the middle one of three teachers has the student's tokenizer."""

    identity: str = "a"
    documents: list[Document] = field(default_factory=list)

    def __call__(self, document: Document) -> Sample:
        self.documents.append(document)
        content = document if isinstance(document, str) else repr(document)
        student, teacher = tokens([ord(c) for c in content]), tokens([ord(c) for c in content[::2]])
        chunks = Chunks(
            np.arange(len(student), dtype=np.int32) // 2,
            np.arange(len(teacher), dtype=np.int32) - 1,
            3,
            5,
            np.array([1], np.int32),
        )
        cross = TeacherSample(teacher, chunks)
        return Sample(student, (cross, TeacherSample(student, None), cross))


def arrays(sample: Sample) -> list[object]:
    def flat(value: object) -> Iterator[object]:
        if isinstance(value, np.ndarray):
            yield value.dtype, value.tolist()
        elif isinstance(value, tuple):
            for inner in value:
                yield from flat(inner)
        else:
            yield value

    return list(flat(astuple(sample)))


DOCUMENTS: tuple[Document, ...] = (
    "",
    "a text",
    "ein Text mit Größe 東京\x00",
    Conversation([{"role": "user", "content": "a text"}]),
    Conversation([{"role": "user", "content": "a text"}], tools=[{"name": "search"}]),
)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_read_sample_is_the_made_one(document: Document) -> None:
    """Catches a lost dtype, a lost teacher, and a same-tokenizer teacher with a copy of the student's tokens."""
    maker = Maker()
    computed = CachedSampleMaker(maker)(document)
    read = CachedSampleMaker(maker)(document)
    assert maker.documents == [document]
    assert arrays(read) == arrays(computed)
    assert read.teachers[1].tokens is read.student


def test_documents_are_told_apart() -> None:
    """Catches one key for a conversation and its text, or for conversations with and without tools."""
    maker = Maker()
    cached = CachedSampleMaker(maker)
    assert len({str(arrays(cached(document))) for document in DOCUMENTS}) == len(DOCUMENTS)
    assert maker.documents == list(DOCUMENTS)


def test_other_settings_have_another_file(folder: Path) -> None:
    first, second = Maker("a"), Maker("b")
    CachedSampleMaker(first)("x")
    CachedSampleMaker(second)("x")
    assert (len(first.documents), len(second.documents)) == (1, 1)
    assert len(list(folder.glob("*.sqlite"))) == 2


def test_a_worker_gets_the_cache_by_pickle() -> None:
    """Catches a connection that travels to another process."""
    cached = CachedSampleMaker(Maker())
    cached("x")
    copy: CachedSampleMaker = pickle.loads(pickle.dumps(cached))
    assert arrays(copy("x")) == arrays(cached("x"))


def fill(start: int, count: int) -> None:
    cached = CachedSampleMaker(Maker())
    for i in range(start, start + count):
        cached(str(i))


def fill_for_ever() -> None:
    fill(0, 10**9)


@pytest.mark.world
def test_processes_write_at_once() -> None:
    """Catches lost samples and failures with four writers of overlapping documents."""
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=fill, args=(start, 60)) for start in (0, 15, 30, 45)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    maker = Maker()
    cached = CachedSampleMaker(maker)
    for i in range(105):
        assert arrays(cached(str(i))) == arrays(Maker()(str(i)))
    assert not maker.documents


@pytest.mark.world
def test_a_writer_is_killed(folder: Path) -> None:
    """Bug: SIGKILL during a write damages earlier samples or prevents later writes."""
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=fill_for_ever)
    writer.start()
    while number_stored(folder) < 50:
        time.sleep(0.02)
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join()
    maker = Maker()
    cached = CachedSampleMaker(maker)
    for i in range(100):
        assert arrays(cached(str(i))) == arrays(Maker()(str(i)))
    assert len(maker.documents) <= 50
    (file,) = folder.glob("*.sqlite")
    assert sqlite3.connect(file).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def number_stored(folder: Path) -> int:
    try:
        (file,) = folder.glob("*.sqlite")
        return int(sqlite3.connect(file).execute("SELECT count(*) FROM samples").fetchone()[0])
    except (ValueError, sqlite3.OperationalError):
        return 0


def test_a_damaged_file_is_begun_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    CachedSampleMaker(Maker())("x")
    (file,) = folder.glob("*.sqlite")
    for journal in folder.glob("*.sqlite-*"):
        journal.unlink()
    file.write_bytes(b"no database at all, but long enough to be looked at" * 100)
    maker = Maker()
    damaged = CachedSampleMaker(maker)
    assert arrays(damaged("x")) == arrays(Maker()("x"))
    assert "is damaged (file is not a database) and is recreated" in caplog.text
    damaged("x")
    CachedSampleMaker(maker)("x")
    assert len(maker.documents) == 1


def test_a_cache_that_cannot_be_used_costs_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bug: the run ends. A folder in the file's place makes SQLite fail to open it."""
    maker = Maker()
    cached = CachedSampleMaker(maker)
    cached._path.mkdir()
    assert arrays(cached("x")) == arrays(cached("x"))
    assert len(maker.documents) == 2
    assert caplog.text.count("samples are not cached in") == 1
    assert "data.cache=false" in caplog.text


def test_a_damaged_sample_is_made_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bug: one damaged row in an intact file ended the run with a bare zlib.error."""
    CachedSampleMaker(Maker())("x")
    (file,) = folder.glob("*.sqlite")
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("UPDATE samples SET value = x'00ff00ff'")
    maker = Maker()
    for _ in range(2):
        assert arrays(CachedSampleMaker(maker)("x")) == arrays(Maker()("x"))
    assert maker.documents == ["x"]
    assert "holds a damaged sample" in caplog.text


def test_a_file_deleted_while_in_use_is_begun_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bug: SQLite continued to write to the deleted file, and the samples were lost."""
    cached = CachedSampleMaker(Maker())
    cached("x")
    for file in folder.iterdir():
        file.unlink()
    cached("y")
    assert "was deleted while in use and is recreated" in caplog.text
    maker = Maker()
    CachedSampleMaker(maker)("y")
    assert not maker.documents


def test_a_file_removed_while_it_is_opened_costs_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a data worker died when another worker removed the damaged file at the same moment."""

    def removed(path: Path) -> None:
        raise FileNotFoundError(path)

    cached = CachedSampleMaker(Maker())
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Path, "stat", removed)
        assert arrays(cached("x")) == arrays(Maker()("x"))
    assert "has just been removed" in caplog.text


def test_a_lock_that_is_kept_costs_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_cache, "WAIT_S", 0.01)
    CachedSampleMaker(Maker())("x")
    (file,) = folder.glob("*.sqlite")
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    cached = CachedSampleMaker(Maker())
    assert arrays(cached("y")) == arrays(cached("y")) == arrays(Maker()("y"))
    assert caplog.text.count("database is locked") == 1


def test_without_a_cache_folder_samples_are_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the run ends. A file in the folder's place prevents its creation."""
    (tmp_path / "taken").touch()
    monkeypatch.setenv("NEMO_OPD_CACHE", str(tmp_path / "taken"))
    assert arrays(CachedSampleMaker(Maker())("x")) == arrays(Maker()("x"))
    assert "set $NEMO_OPD_CACHE" in caplog.text
