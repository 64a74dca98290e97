"""Files of a run that somebody has replaced by links, as a downloaded run folder may contain them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_opd.checkpoint.run_directory import LOCK_NAME, RunLock
from nemo_opd.config.run_fields import RolloutFiles
from nemo_opd.errors import StorageError
from nemo_opd.logging.loggers import JsonlLogger
from nemo_opd.logging.questions import QuestionValues, SampleLog, ValueLog
from nemo_opd.rollout.collect import RolloutLog
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
    """Bug: a run created, emptied or lengthened the file that a link in its folder named."""
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    (folder / name).symlink_to(outside)
    with pytest.raises(StorageError, match=f"{name} could not be written .*; remove the symbolic link"):
        write(folder)
    assert not outside.exists()
