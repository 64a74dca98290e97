"""Checkpoints are complete or absent, the newest is found, and only `keep_last` stay."""

import hashlib
import multiprocessing
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_opd.checkpoint.manager import CheckpointManager, Progress
from nemo_opd.errors import CheckpointError, DamagedError


def progress(step: int) -> Progress:
    return Progress(
        step=step,
        loader={"num_batches": step, "seed": 7},
        kd_scale={"ce": 0.1 + 0.2, "kd": 1 / 3},  # long decimals, which must come back bit for bit
        skipped_steps={"total": 4, "in_a_row": 0},
        bits_per_byte={"val/bits_per_byte": 1.5},
        settings={"run.seed": 7, "student.optimizer.betas.0": 0.9, "run.output_dir": None},
    )


def write(manager: CheckpointManager, step: int) -> None:
    with manager.writing(progress(step)) as folder:
        (folder / "state").mkdir()
        (folder / "state" / "rank_0.pt").write_bytes(b"weights")


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run" / "checkpoints", keep_last=2)
    assert manager.steps() == []
    write(manager, 100)

    assert entries(manager.folder) == ["step_000100"]
    assert entries(manager.path(100)) == ["manifest.json", "progress.json", "state"]
    assert CheckpointManager(manager.folder, keep_last=1).steps() == [100]
    assert manager.read(100) == progress(100)


def fail_while_writing(manager: CheckpointManager, step: int, error: BaseException) -> None:
    with manager.writing(progress(step)) as folder:
        (folder / "half").write_bytes(b"written")
        raise error


@pytest.mark.parametrize("error", [RuntimeError("a worker died"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_inside_leaves_no_trace(error: BaseException, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    write(manager, 1)
    with pytest.raises(type(error)):
        fail_while_writing(manager, 2, error)

    assert entries(tmp_path) == ["step_000001"]
    assert manager.read(1) == progress(1)


def test_a_full_disk_is_told_with_the_folder_and_the_way_out(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    write(manager, 1)
    message = (
        r"step_000002 could not be written \(No space left on device; .* needed, .* free\); free some space, or choose "
        r"another run\.output_dir, or keep fewer checkpoints \(train\.keep_last\)$"
    )
    with pytest.raises(CheckpointError, match=message), manager.writing(progress(2)):
        raise OSError(28, os.strerror(28))

    assert entries(tmp_path) == ["step_000001"]


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(CheckpointError, match="checkpoints/step_000001 could not be written"):
        write(CheckpointManager(tmp_path / "checkpoints", keep_last=1), 1)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (10, 20, 30, 40):
        write(manager, step)
    assert manager.steps() == [30, 40]

    write(CheckpointManager(tmp_path, keep_last=1), 50)
    assert manager.steps() == [50]


def test_after_steps_that_were_not_taken_older_ones_stay(tmp_path: Path) -> None:
    """Bug: the checkpoint of a diverged student with finite weights replaces the last good one."""
    manager = CheckpointManager(tmp_path, keep_last=1)
    write(manager, 1)
    for step in (2, 3):
        with manager.writing(replace(progress(step), skipped_steps={"total": step, "in_a_row": step})):
            pass
    assert manager.steps() == [1, 2, 3]

    write(manager, 4)
    assert manager.steps() == [4]


def test_steps_are_numbers_and_not_names(tmp_path: Path) -> None:
    """Bug: sorted by name, step_1000000 comes before step_999999 and is removed as older."""
    manager = CheckpointManager(tmp_path, keep_last=1)
    write(manager, 999_999)
    write(manager, 1_000_000)

    assert manager.steps() == [1_000_000]
    assert manager.read(1_000_000).step == 1_000_000


def test_a_step_is_written_again(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    write(manager, 3)
    with manager.writing(progress(3)):
        pass

    assert entries(tmp_path) == ["step_000003"]
    assert entries(manager.path(3)) == ["manifest.json", "progress.json"]


def test_a_step_that_cannot_be_removed_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a file in use on NFS ends the run with half of the old checkpoint and none of the new one."""
    manager = CheckpointManager(tmp_path, keep_last=2)
    write(manager, 3)
    with monkeypatch.context() as busy:
        busy.setattr(shutil, "rmtree", lambda path, **_: None)
        with manager.writing(progress(3)):
            pass
    assert manager.steps() == [3]
    assert entries(manager.path(3)) == ["manifest.json", "progress.json"]
    manager.remove_incomplete()
    assert entries(tmp_path) == ["step_000003"]


def test_a_step_that_a_killed_run_was_replacing_comes_back(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    write(manager, 3)
    manager.path(3).rename(tmp_path / ".step_000003.old.abcdefgh")
    manager.remove_incomplete()
    assert manager.steps() == [3]


def test_other_entries_are_left_alone(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    for name in ("notes", "step_12", "step_000001.bak", "best"):
        (tmp_path / name).mkdir()
    write(manager, 1)
    write(manager, 2)
    manager.remove_incomplete()

    assert entries(tmp_path) == ["best", "notes", "step_000001.bak", "step_000002", "step_12"]


@pytest.mark.world
def test_what_a_killed_run_left_is_no_checkpoint(tmp_path: Path) -> None:
    """Bug: a half-written checkpoint counts as complete after SIGKILL, which runs no clean-up."""
    manager = CheckpointManager(tmp_path, keep_last=3)
    write(manager, 1)
    killed = multiprocessing.get_context("fork").Process(target=die_while_writing, args=(manager,))
    killed.start()
    killed.join()

    assert killed.exitcode == -signal.SIGKILL
    assert len(entries(tmp_path)) == 2
    assert manager.steps() == [1]
    manager.remove_incomplete()
    assert entries(tmp_path) == ["step_000001"]


def die_while_writing(manager: CheckpointManager) -> None:
    with manager.writing(progress(2)) as folder:
        (folder / "half").write_bytes(b"written")
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_run_left_is_not_in_the_way(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=3)
    with manager.writing(progress(2)) as leftover:
        pass
    manager.path(2).rename(leftover)
    (leftover / "half").write_bytes(b"of another attempt")
    write(manager, 2)

    assert entries(manager.path(2)) == ["manifest.json", "progress.json", "state"]


def test_nothing_to_remove_where_nothing_is(tmp_path: Path) -> None:
    CheckpointManager(tmp_path / "absent", keep_last=1).remove_incomplete()

    assert entries(tmp_path) == []


def test_a_checkpoint_without_room_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a full disk is noticed only after hours of writing."""
    manager = CheckpointManager(tmp_path, keep_last=1)
    write(manager, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**6, free=300))
    message = r"step_000002: no room for this checkpoint \(5\.0 kB needed, 300 bytes free\); free some space, or "
    with pytest.raises(CheckpointError, match=message), manager.writing(progress(2), estimate=5000):
        raise AssertionError("it was begun")
    with pytest.raises(CheckpointError, match=r"no room for this checkpoint \(.* needed, 300 bytes free\)"):
        write(manager, 2)  # as large as the one before

    assert entries(tmp_path) == ["step_000001"]


def damaged(manager: CheckpointManager, step: int, how: str) -> None:
    file = manager.path(step) / "state" / "rank_0.pt"
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content if how == "flipped" else content[:-1])


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=4)
    for step in (1, 2, 3, 4):
        write(manager, step)
    damaged(manager, 4, "flipped")
    (manager.path(3) / "progress.json").unlink()
    newest = manager.newest()

    assert newest is not None
    assert newest.progress == progress(2)
    assert list(newest.damaged) == [4, 3]
    first, second = newest.warnings(manager)
    flipped = hashlib.sha256(b"weifhts").hexdigest()[:16]
    assert first == (
        f"{tmp_path}/step_000004 is damaged: state/rank_0.pt (7 bytes) has the SHA-256 {flipped}…, but "
        f"{hashlib.sha256(b'weights').hexdigest()[:16]}… was written; the run continues from {tmp_path}/step_000002 "
        "instead, and renames this one damaged_step_000004"
    )
    assert second.startswith(f"{tmp_path}/step_000003/progress.json is missing; the run continues from ")


def test_what_a_file_holds_is_compared_where_asked(tmp_path: Path) -> None:
    """Catches hashing, which takes minutes, with `hashed=False`: then only sizes are compared."""
    manager = CheckpointManager(tmp_path, keep_last=2)
    write(manager, 1)
    damaged(manager, 1, "flipped")
    assert manager.newest(hashed=False) is not None
    damaged(manager, 1, "cut")
    with pytest.raises(CheckpointError, match=r"rank_0\.pt has 6 bytes, but 7 were written"):
        manager.newest(hashed=False)


def test_where_none_is_whole_all_are_told_in_one_error(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=9)
    for step in range(1, 6):
        write(manager, step)
        damaged(manager, step, "cut")
    with pytest.raises(CheckpointError) as caught:
        manager.newest()

    message = str(caught.value)
    assert message.startswith(
        f"no checkpoint in {tmp_path} is complete: {tmp_path}/step_000005 is damaged: state/rank_0.pt "
    )
    assert message.count("is damaged") == 3
    assert message.endswith("; and 2 more; copy one there again, or start anew with another run.output_dir")
    assert "\n" not in message


def test_a_damaged_one_is_set_aside_and_not_counted(tmp_path: Path) -> None:
    """Bug: a damaged checkpoint counts as the newest, so complete ones of earlier steps are removed."""
    manager = CheckpointManager(tmp_path, keep_last=1)
    write(manager, 1)
    write(CheckpointManager(tmp_path, keep_last=2), 9)
    damaged(manager, 9, "flipped")
    manager.set_aside(9)
    write(manager, 2)

    assert entries(tmp_path) == ["damaged_step_000009", "step_000002"]


def test_one_of_an_older_version_is_taken_with_a_warning(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    (tmp_path / "step_000004").mkdir()
    (tmp_path / "step_000004" / "progress.json").write_text('{"step": 4, "loader": {}, "settings": {}}')
    newest = manager.newest()

    assert newest is not None
    assert newest.progress == Progress(4, {}, {})
    (warning,) = newest.warnings(manager)
    assert warning.startswith(f"{tmp_path}/step_000004 has no manifest.json, because an older version wrote it")


def test_one_of_a_newer_version_is_not_taken_for_damaged(tmp_path: Path) -> None:
    """Bug: after a downgrade the run continues from an older step and renames the newest checkpoint as damaged."""
    manager = CheckpointManager(tmp_path, keep_last=2)
    write(manager, 1)
    write(manager, 2)
    file = manager.path(2) / "progress.json"
    file.write_text(file.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(
        CheckpointError, match=r"step_000002 was written by a newer version \(format 3; .* update"
    ) as caught:
        manager.newest()
    assert not isinstance(caught.value, DamagedError)


def test_what_cannot_be_removed_is_no_checkpoint_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a file in use on NFS ends a run that has just saved."""
    manager = CheckpointManager(tmp_path, keep_last=1)
    write(manager, 1)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)
    write(manager, 2)
    assert manager.steps() == [2]


def test_a_manifest_that_is_absent_is_no_older_version(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    write(manager, 4)
    (manager.path(4) / "manifest.json").unlink()
    with pytest.raises(DamagedError, match=r"manifest\.json is missing"):
        manager.read(4)


RECORDS = {
    "": "invalid JSON",
    '{"step": 4, "loa': "invalid JSON",
    "\x00" * 40: "invalid JSON",
    "[" * 100_000: "invalid JSON",
    "[]": "input should be an object",
    "null": "input should be an object",
    '{"step": 4, "loader": {}}': "settings: field required",
    '{"step": "4", "loader": {}, "settings": {}}': "step: input should be a valid integer, not '4'",
    '{"step": -1, "loader": {}, "settings": {}}': "step: input should be greater than or equal to 0, not -1",
    '{"step": 9, "loader": {}, "settings": {}}': "it records step 9",
    '{"step": 4, "loader": {"a": "b"}, "settings": {}}': "loader.a: input should be a valid integer, not 'b'",
    '{"step": 4, "loader": {}, "settings": [1]}': "settings: input should be an object, not [1]",
    '{"step": 4, "loader": {}, "settings": {}, "zzz": 1}': "zzz: unexpected",
}


@pytest.mark.parametrize("text", RECORDS, ids=lambda text: text[:50])
def test_a_record_of_another_form_is_refused(text: str, tmp_path: Path) -> None:
    """Bug: a resume from a record that is cut, of another version or type, or zeros after a power cut."""
    manager = CheckpointManager(tmp_path, keep_last=2)
    (tmp_path / "step_000004").mkdir()
    (tmp_path / "step_000004" / "progress.json").write_text(text)
    with pytest.raises(DamagedError) as caught:
        manager.read(4)

    assert str(caught.value).startswith(f"{tmp_path}/step_000004/progress.json is damaged: {RECORDS[text]}")
    assert "\n" not in str(caught.value)


def test_a_record_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step_000004").mkdir()
    (tmp_path / "step_000004" / "progress.json").write_bytes(b'{"step": 4, "\xff": 1}')
    with pytest.raises(DamagedError, match=r"progress\.json is damaged: invalid JSON"):
        CheckpointManager(tmp_path, keep_last=2).read(4)
