"""Manifests: every file of a checkpoint is checked by size and hash, and synced before the checkpoint gets its name."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nemo_opd.checkpoint import manager
from nemo_opd.checkpoint.manager import CheckpointManager, Progress, read_manifest, require_hashes, require_sizes, seal
from nemo_opd.errors import DamagedError
from nemo_opd.progress import Work, working

LARGE = bytes(range(256)) * 40_000
"""Content that takes several reads."""


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    folder = tmp_path / "step_000001"
    (folder / "state").mkdir(parents=True)
    (folder / "state" / ".metadata").write_bytes(b"index")
    (folder / "state" / "__0_0.distcp").write_bytes(LARGE)
    (folder / "empty").touch()
    seal(folder)
    return folder


def require_whole(folder: Path) -> None:
    manifest = read_manifest(folder)
    require_sizes(folder, manifest)
    require_hashes(folder, manifest)


@pytest.mark.world
def test_hashes_are_those_of_sha256sum(sealed: Path) -> None:
    files = read_manifest(sealed).files
    assert sorted(files) == ["empty", "state/.metadata", "state/__0_0.distcp"]
    for name, entry in files.items():
        printed = subprocess.run(["sha256sum", sealed / name], capture_output=True, text=True, check=True).stdout
        assert printed.split()[0] == entry.sha256
        assert (sealed / name).stat().st_size == entry.size
    require_whole(sealed)


def change(name: str, edit: Callable[[bytearray], None]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        edit(content)
        (folder / name).write_bytes(content)

    return changed


def flip(content: bytearray) -> None:
    content[len(content) // 2] ^= 4


SHARD = "state/__0_0.distcp"
DAMAGES = {
    "a bit": (change(SHARD, flip), r"state/__0_0\.distcp \([\d,]+ bytes\) has the SHA-256 \w{16}…, but \w{16}… was"),
    "a bit of the index": (change("state/.metadata", flip), r"state/\.metadata \(5 bytes\) has the SHA-256"),
    "cut": (change(SHARD, lambda content: content.clear()), r"distcp has 0 bytes, but 10,240,000 were written"),
    "longer": (change("empty", lambda content: content.append(1)), "empty has 1 bytes, but 0 were written"),
    "absent": (lambda folder: (folder / SHARD).unlink(), r"distcp is missing \(10,240,000 bytes were written\)"),
    "a folder": (lambda folder: ((folder / "empty").unlink(), (folder / "empty").mkdir()), "empty is missing"),
    "a bit of the manifest": (change("manifest.json", flip), "is damaged"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), r"manifest\.json is missing"),
    "an empty manifest": (change("manifest.json", lambda content: content.clear()), "is damaged: invalid JSON"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_not_as_it_was_written_is_named(name: str, sealed: Path) -> None:
    """Bug: a run continues from flipped bits."""
    damage, message = DAMAGES[name]
    damage(sealed)
    with pytest.raises(DamagedError, match=message):
        require_whole(sealed)


WRONG = {
    '{"files": []}': "files: input should be",
    "{}": "files: field required",
    '{"files": {}, "more": 1}': "more: extra inputs are not permitted",
    '{"files": {}, "version": 2}': "version: input should be 1",
    '{"files": {"a": {"size": "1", "sha256": "0"}}}': r"files\.a\.size: input should be a valid integer",
    '{"files": {"a": {"size": -1, "sha256": "0"}}}': r"files\.a\.size: input should be greater than or equal to 0",
    '{"files": {"a": {"size": 1, "sha256": "0"}}}': r"files\.a\.sha256: string should match",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_manifest_of_another_form_is_refused(text: str, sealed: Path) -> None:
    (sealed / "manifest.json").write_text(text)
    with pytest.raises(DamagedError, match=rf"manifest\.json is damaged: {WRONG[text]}"):
        read_manifest(sealed)


def test_every_bit_of_a_manifest_counts(sealed: Path) -> None:
    content = (sealed / "manifest.json").read_bytes()
    original = json.loads(content)
    for place in range(len(content)):
        edited = bytearray(content)
        edited[place] ^= 1
        (sealed / "manifest.json").write_bytes(edited)
        try:
            manifest = read_manifest(sealed)
        except DamagedError:
            continue
        if json.loads(manifest.model_dump_json()) != original:
            with pytest.raises(DamagedError):
                require_whole(sealed)


def test_what_is_read_is_counted(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a progress bar with a wrong total."""
    seen: list[Work] = []

    @contextmanager
    def noted(name: str, total: int, unit: str) -> Iterator[Work]:
        with working(name, total, unit) as work:
            seen.append(work)
            yield work

    monkeypatch.setattr(manager, "working", noted)
    require_hashes(sealed, read_manifest(sealed))
    (work,) = seen
    assert (work.name, work.unit) == ("checking step_000001", "B")
    assert work.done == work.total == len(LARGE) + 5


def test_a_file_that_cannot_be_read_ends_the_others(sealed: Path) -> None:
    """Bug: other threads read on for minutes after an error."""
    manifest = read_manifest(sealed)
    (sealed / "empty").unlink()
    with pytest.raises(FileNotFoundError):
        require_hashes(sealed, manifest)


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: after a power cut the checkpoint exists, but its files are empty."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(handle: int) -> None:
        fsync(handle)
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")).relative_to(tmp_path).as_posix())

    def renamed(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    with CheckpointManager(tmp_path / "checkpoints", 1).writing(Progress(1, {}, {})) as folder:
        (folder / "state").mkdir()
        (folder / "state" / "shard").write_bytes(b"weights")

    before_rename, after_rename = events[: events.index("rename")], events[events.index("rename") + 1 :]
    root = "checkpoints/.incomplete_step_000001"
    files = {f"{root}/{name}" for name in ("state/shard", "progress.json", "manifest.json")}
    assert files <= set(before_rename)
    assert before_rename.index(f"{root}/state") > before_rename.index(f"{root}/state/shard")
    assert before_rename[-1] == root
    assert after_rename == ["checkpoints"]
