"""Shards: complete or absent, searched by the teacher's ids, and refused if damaged."""

import json
import os
import signal
import stat
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from safetensors.numpy import save

from nemo_opd.errors import DataError
from nemo_opd.teacher_cache.reader import SHARDS, CacheReader, CacheWriter, shard_files
from nemo_opd.teacher_cache.shard import CacheManifest, Shard, decoded_ids, encoded_ids, read_manifest, write_manifest
from tests import processes

MANIFEST = CacheManifest("top_k", "teacher", "weights", "tokenizer", "template", 70_000, "bfloat16", 4, 3)


def text(number: int, length: int = 9) -> np.ndarray:
    return np.arange(length, dtype=np.int32) * 7_777 + number


def answers(ids: np.ndarray, width: int = 5) -> np.ndarray:
    return (ids[:, None] * 31 + np.arange(width)).astype(np.uint8)


def filled(folder: Path, numbers: range, shard_bytes: int = 200) -> Path:
    write_manifest(folder, MANIFEST)
    with CacheWriter(folder, MANIFEST.vocab_size, shard_bytes) as writer:
        for number in numbers:
            writer.add(text(number, 3 + number % 5), answers(text(number, 3 + number % 5)))
    return folder


@pytest.mark.parametrize(
    ("kind", "equal_factors"), [("longrope", {(20, 30), (40, 45)}), ("dynamic", {(20, 30)}), ("default", {(20, 40)})]
)
def test_a_cut_text_needs_the_longer_texts_rotary_factors(
    tmp_path: Path, kind: str, equal_factors: set[tuple[int, int]]
) -> None:
    """Catches a cut text with the states of a longer text that has other rotary factors."""
    rope = {"rope_type": kind, "original_max_position_embeddings": 32}
    config = {"rope_parameters": rope, "max_position_embeddings": 32 if kind == "dynamic" else 128}
    for cut_length, length in [(20, 30), (20, 40), (40, 45)]:
        folder = tmp_path / str(length)
        write_manifest(folder, MANIFEST)
        (folder / "config.json").write_text(json.dumps(config))
        with CacheWriter(folder, MANIFEST.vocab_size) as writer:
            writer.add(text(0, length), answers(text(0, length)))
        reader = CacheReader(folder)
        assert reader.has(text(0, length))
        assert reader.has(text(0, cut_length)) == ((cut_length, length) in equal_factors or kind == "default")


def test_every_segment_comes_back(tmp_path: Path) -> None:
    """Catches a segment with another segment's rows, or one that is lost between two shards."""
    reader = CacheReader(filled(tmp_path, range(40)))
    assert len(reader.shards) > 3
    assert len(reader) == 40
    for number in reversed(range(40)):
        ids = text(number, 3 + number % 5)
        segment = reader.segment(ids)
        assert np.array_equal(decoded_ids(segment.tokens), ids)
        assert np.array_equal(segment.rows, answers(ids))
        assert not segment.rows.flags.owndata  # a view of the mapped file


def test_the_beginning_of_a_segment_is_found(tmp_path: Path) -> None:
    """Catches a refused text that a student cuts earlier, and rows of another text with the same first words."""
    write_manifest(tmp_path, MANIFEST)
    first, second = np.arange(40, dtype=np.int32), np.arange(40, dtype=np.int32)
    second[20:] += 9
    with CacheWriter(tmp_path, MANIFEST.vocab_size) as writer:
        for ids in (first, second):
            writer.add(ids, answers(ids))
    reader = CacheReader(tmp_path)
    for ids in (first[:25], second[:25], first[:16]):
        segment = reader.segment(ids)
        assert np.array_equal(segment.rows, answers(ids))
        assert np.array_equal(decoded_ids(segment.tokens), ids)
    mixed = np.concatenate([first[:30], second[30:]])
    for ids in (mixed, first[:9], np.append(first, 1)):
        with pytest.raises(DataError, match="holds no answers"):
            reader.segment(ids)


def test_texts_with_the_same_opening_are_distinguished_without_reading_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a resumed build that reads the entire cache for each missing conversation."""
    write_manifest(tmp_path, MANIFEST)
    opening = np.arange(50, dtype=np.int32)
    texts = [np.concatenate([opening, text(number, 3 + number % 40)]) for number in range(60)]
    with CacheWriter(tmp_path, MANIFEST.vocab_size) as writer:
        for ids in texts[::2]:
            writer.add(ids, answers(ids))
    reader, read, segment = CacheReader(tmp_path), [], Shard.segment
    monkeypatch.setattr(Shard, "segment", lambda shard, number: read.append(number) or segment(shard, number))

    assert not any(reader.has(ids) for ids in texts[1::2])
    assert not read
    for ids in texts[::2]:
        assert np.array_equal(reader.segment(ids[:-1]).rows, answers(ids[:-1]))
    assert len(read) == len(texts[::2])
    assert len(reader.segment(opening[:16]).rows) == 16


@hypothesis.settings(max_examples=30)
@hypothesis.given(st.lists(st.integers(-1, 2**24 - 2), min_size=1, max_size=20))
def test_ids_come_back(ids: list[int]) -> None:
    """Catches an id above 65,535 that loses its highest byte."""
    expected = [2**24 - 1 if token == -1 else token for token in ids]
    assert decoded_ids(encoded_ids(np.array(ids), 3)).tolist() == expected


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    """Catches answers to another text with the same beginning."""
    reader = CacheReader(filled(tmp_path, range(3)))
    with pytest.raises(DataError, match=r"no answers of teacher to segment [0-9a-f]{32}, which has 2 of its tokens"):
        reader.segment(text(0, 3)[:2])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def index_flipped(path: Path) -> None:
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(content[:begin] + bytes([content[begin] ^ 1]) + content[begin + 1 :])


@pytest.mark.parametrize("damage", [flipped, cut, emptied, index_flipped])
def test_a_damaged_shard_is_refused(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Catches training on a damaged shard, and one that ends the process without a message."""
    folder = filled(tmp_path, range(3), 10_000)
    (path,) = shard_files(folder)
    damage(path)
    with pytest.raises(DataError, match=f"{path.name}.*damaged"):
        list(CacheReader(folder).each())


HOSTILE: dict[str, dict[str, Any]] = {
    "no object": {"header": []},
    "deep nesting": {"text": "[" * 100_000},
    "a shape without bytes": {"tokens": {"dtype": "U8", "shape": [1 << 62, 4], "data_offsets": [0, 0]}},
    "a shape beyond the file": {"rows": {"dtype": "U8", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 8]}},
    "negative offsets": {"rows": {"dtype": "U8", "shape": [1, 1], "data_offsets": [-(1 << 70), 4]}},
    "another type": {"begins": {"dtype": "U64", "shape": [4], "data_offsets": [0, 32]}},
}


@pytest.mark.parametrize("attack", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_refused(tmp_path: Path, attack: dict[str, Any]) -> None:
    """Bug: a library's traceback or exhausted memory instead of a message."""
    (path,) = shard_files(filled(tmp_path, range(3), 10_000))
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    text = attack.get("text") or json.dumps(attack.get("header", {**header, **attack}))
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + content[begin:])
    with pytest.raises(DataError, match=f"{path.name} is damaged"):
        Shard(path)


@pytest.mark.parametrize("begins", [[0, 5, 3], [1, 2, 3], [0, 1, 1 << 40], [0, -5, 1]])
def test_segments_outside_of_the_shard_are_refused(tmp_path: Path, begins: list[int]) -> None:
    """Bug: a segment that is longer than its tokens, or overlaps another one."""
    tokens = np.zeros((3, 2), np.uint8)
    tensors = {
        "keys": np.zeros((2, 16), np.uint8),
        "openings": np.zeros(2, np.uint64),
        "begins": np.array(begins, np.int64),
        "checksums": np.zeros(2, np.uint32),
        "tokens": tokens,
        "rows": tokens,
    }
    index = zlib.crc32(b"".join(tensors[name].tobytes() for name in ("keys", "openings", "begins", "checksums")))
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(tensors, {"index_checksum": str(index)}))
    with pytest.raises(DataError, match="its segments are not in order"):
        Shard(path)


def test_a_replaced_segment_is_read(tmp_path: Path) -> None:
    """Catches a damaged segment that is read although another shard has an intact copy."""
    for folder in (tmp_path / "a", tmp_path / "b"):
        filled(folder, range(1))
        (shard,) = shard_files(folder)
        flipped(shard)
        assert not CacheReader(folder).has(text(0, 3))
        filled(folder, range(1))
        reader = CacheReader(folder)
        assert np.array_equal(reader.segment(text(0, 3)).rows, answers(text(0, 3)))
        # Bug: the cache is refused after its damaged segment is replaced, with the advice to replace it.
        assert [len(segment.rows) for segment in reader.each()] == 2 * [len(answers(text(0, 3)))]


def test_other_answers_are_not_mixed(tmp_path: Path) -> None:
    """Catches a cache continued with other weights; the model's name and the servers' limit may differ."""
    write_manifest(tmp_path, MANIFEST)
    write_manifest(tmp_path, replace(MANIFEST, teacher="/elsewhere", positions=4095))
    assert read_manifest(tmp_path) == MANIFEST
    with pytest.raises(DataError, match=r"weights is weights there and abababababab… here; name another"):
        write_manifest(tmp_path, replace(MANIFEST, weights=32 * "ab"))


def test_a_manifest_that_is_cut_off_is_one_message(tmp_path: Path) -> None:
    """Catches a parser's message of several lines."""
    (tmp_path / "cache.yaml").write_text("form: [")
    with pytest.raises(DataError, match=r"cache\.yaml cannot be read .*; build the cache again") as caught:
        read_manifest(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    """Catches a wrong path that is read as an empty cache."""
    with pytest.raises(DataError, match="is not a teacher cache"):
        CacheReader(tmp_path)


def _killed_while_it_writes(rank: int, folder: Path) -> None:
    sync, replace = os.fsync, os.replace
    replaced: list[str] = []

    def sync_or_die(handle: int) -> None:
        if len(replaced) == 2 and stat.S_ISREG(os.fstat(handle).st_mode):
            os.kill(os.getpid(), signal.SIGKILL)
        sync(handle)

    def noting(source: str, target: Path) -> None:
        if target.parent.name == SHARDS:
            replaced.append(source)
        replace(source, target)

    os.fsync, os.replace = sync_or_die, noting  # type: ignore[assignment]
    filled(folder, range(40))


@pytest.mark.world
def test_a_killed_worker_leaves_complete_shards(tmp_path: Path) -> None:
    """Catches half a shard that is read, finished shards that the index lacks, and a temporary file that stays."""
    with pytest.raises(Exception):  # noqa: B017, PT011  the helper chooses the type
        processes.start(_killed_while_it_writes, (tmp_path,), 1)
    reader = CacheReader(tmp_path)
    assert len(reader.shards) == 2
    num_written = len(list(reader.each()))
    assert len(list((tmp_path / SHARDS).iterdir())) == 3
    filled(tmp_path, range(num_written, 40))
    again = CacheReader(tmp_path)
    assert [len(again.segment(text(number, 3 + number % 5)).tokens) for number in range(40)]
    assert len(list((tmp_path / SHARDS).iterdir())) == len(again.shards)


def test_another_workers_temporary_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a new worker that removes the file of a running worker as abandoned."""
    write_manifest(tmp_path, MANIFEST)
    sync, names = os.fsync, []

    def sync_beside_another(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        with CacheWriter(tmp_path, MANIFEST.vocab_size):
            names.extend(path.name for path in (tmp_path / SHARDS).iterdir())
        sync(handle)

    with CacheWriter(tmp_path, MANIFEST.vocab_size) as writer:
        writer.add(text(0), answers(text(0)))
        monkeypatch.setattr(os, "fsync", sync_beside_another)
    assert [name[0] for name in names] == ["."]
    assert len(CacheReader(tmp_path)) == 1
