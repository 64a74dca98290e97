"""Symbolic links in the place of a run's files, as a downloaded run folder may have them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_opd.checkpoint.run_directory import LOCK_NAME, RunLock
from nemo_opd.config.run_fields import RolloutFiles
from nemo_opd.errors import RolloutError, StorageError
from nemo_opd.files import replacing
from nemo_opd.logging.loggers import JsonlLogger
from nemo_opd.logging.scores import QuestionValues, SampleLog, ValueLog
from nemo_opd.rollout.collect import RolloutLog
from nemo_opd.rollout.server.server_process import ServerProcess
from tests.logging.synthetic import summary

VALUES = QuestionValues(1, "", None, ("a",), {"reward": (1.0,)})
WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "lock": (LOCK_NAME, RunLock),
    "metrics": ("metrics.jsonl", lambda folder: JsonlLogger(folder / "metrics.jsonl").start(summary(folder), 1)),
    "samples": ("samples.jsonl", lambda folder: SampleLog(folder / "samples.jsonl").write([])),
    "values": ("evaluation.jsonl", lambda folder: ValueLog(folder / "evaluation.jsonl").write(VALUES)),
    "rollouts": ("rollouts.jsonl", lambda folder: RolloutLog(folder, RolloutFiles(every=1)).write(1, [], [])),
}


@pytest.mark.parametrize(("name", "write"), WRITERS.values(), ids=WRITERS)
def test_a_file_is_not_written_through_a_link(tmp_path: Path, name: str, write: Callable[[Path], object]) -> None:
    """Bug: a run created, emptied or appended to the target of a link in its folder."""
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    (folder / name).symlink_to(outside)
    with pytest.raises(StorageError, match=f"{name} could not be written .*; remove the symbolic link"):
        write(folder)
    assert not outside.exists()


def test_an_export_does_not_go_through_a_link(tmp_path: Path) -> None:
    """Bug: the new folder was written to the target of a link that had the temporary folder's name."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / ".final.incomplete").symlink_to(outside)
    with replacing(tmp_path / "final") as folder:
        folder.mkdir()
        (folder / "model").touch()
    assert (tmp_path / "final" / "model").exists()
    assert not list(outside.iterdir())


def test_a_servers_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    """Bug: the target of a link named server.log was emptied."""
    outside = tmp_path / "outside"
    outside.write_text("kept")
    (tmp_path / "server.log").symlink_to(outside)
    with pytest.raises(RolloutError, match="logs to"):
        ServerProcess(["true"], {}, tmp_path / "server.log", tmp_path / "private")
    assert outside.read_text() == "kept"
