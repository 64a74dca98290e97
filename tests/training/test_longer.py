"""A finished run that is trained longer."""

from pathlib import Path

from nemo_opd.logging.loggers import read
from tests.tiny import Tiny
from tests.training.launch import run_here


def test_a_run_that_is_made_longer_follows_the_longer_schedule(tiny: Tiny, tmp_path: Path) -> None:
    """Bug: the first step after a finished run has the learning rate of its end, 0, and trains nothing."""
    settings = tiny.overrides("student.scheduler.warmup_steps=0", teachers=1)
    run_here(tmp_path / "uninterrupted", [*settings, "train.max_steps=3"])
    run_here(tmp_path / "longer", [*settings, "train.max_steps=1"])
    run_here(tmp_path / "longer", [*settings, "train.max_steps=3", "run.resume=auto"])
    uninterrupted, longer = (read(tmp_path / name / "metrics.jsonl") for name in ("uninterrupted", "longer"))
    rates = [[record["train/lr"] for record in records[2:]] for records in (uninterrupted, longer)]
    assert rates[0] == rates[1]
    assert rates[0][0] > 0
