"""Checkpoints are complete or absent, found again, and kept in number."""

import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_opd.checkpoint.manager import CheckpointManager, Progress
from nemo_opd.errors import CheckpointError


def progress(step: int) -> Progress:
    return Progress(
        step=step,
        loader={"num_batches": step, "seed": 7},
        kd_scale={"ce": 0.1 + 0.2, "kd": 1 / 3},  # no short decimals: they must come back to the last bit
        skipped_steps={"total": 4, "in_a_row": 0},
        bits_per_byte={"student before": 1.5},
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
    assert entries(manager.path(100)) == ["progress.json", "state"]
    assert CheckpointManager(manager.folder, keep_last=1).steps() == [100]
    assert manager.read(100) == progress(100)


def test_it_is_absent_until_it_is_complete(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    with manager.writing(progress(5)):
        assert manager.steps() == []
        assert not manager.path(5).exists()
    assert manager.steps() == [5]


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
    message = r"step_000002 could not be written \(.*No space left.*\); make room or choose another run\.output_dir"
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
    """Bug: a student that has diverged, whose weights are still finite, takes the place of the last good one."""
    manager = CheckpointManager(tmp_path, keep_last=1)
    write(manager, 1)
    for step in (2, 3):
        with manager.writing(replace(progress(step), skipped_steps={"total": step, "in_a_row": step})):
            pass
    assert manager.steps() == [1, 2, 3]

    write(manager, 4)
    assert manager.steps() == [4]


def test_steps_are_numbers_and_not_names(tmp_path: Path) -> None:
    """By name, step_1000000 would go before step_999999 and be removed as the older one."""
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
    assert entries(manager.path(3)) == ["progress.json"]


def test_other_entries_are_left_alone(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    for name in ("notes", "step_12", "step_000001.bak", "best"):
        (tmp_path / name).mkdir()
    write(manager, 1)
    write(manager, 2)
    manager.remove_incomplete()

    assert entries(tmp_path) == ["best", "notes", "step_000001.bak", "step_000002", "step_12"]


def test_what_a_killed_run_left_is_no_checkpoint(tmp_path: Path) -> None:
    """SIGKILL runs no clean-up, so the folder's name alone must say that it is not whole."""
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

    assert entries(manager.path(2)) == ["progress.json", "state"]


def test_nothing_to_remove_where_nothing_is(tmp_path: Path) -> None:
    CheckpointManager(tmp_path / "absent", keep_last=1).remove_incomplete()

    assert entries(tmp_path) == []


WHOLE = json.dumps({"step": 4, "loader": {}})


@pytest.mark.parametrize("text", ["", WHOLE[:-5], WHOLE, "[]", "null", '{"unknown": 1}', "\x00" * 40])
def test_a_torn_record_is_refused(text: str, tmp_path: Path) -> None:
    """Cut, of another version, or zeros after a power cut: never a resume from half a state."""
    manager = CheckpointManager(tmp_path, keep_last=2)
    write(manager, 4)
    (manager.path(4) / "progress.json").write_text(text)

    with pytest.raises(
        CheckpointError, match=r"step_000004/progress\.json cannot be read \(.*; remove .*step_000004 to"
    ):
        manager.read(4)


def test_a_record_that_is_absent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step_000004").mkdir()
    with pytest.raises(CheckpointError, match=r"progress\.json cannot be read"):
        CheckpointManager(tmp_path, keep_last=2).read(4)
