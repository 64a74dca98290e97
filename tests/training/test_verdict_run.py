"""The verdict of whole runs: a baseline beside the run, and the export of a student that got worse."""

from pathlib import Path

import pytest

from nemo_opd.logging.loggers import read
from nemo_opd.logging.records import BASELINE
from nemo_opd.training import off_policy
from tests.tiny import Tiny
from tests.training.launch import run_here


def test_a_worse_student_is_exported_only_on_request(tiny: Tiny, tmp_path: Path) -> None:
    """Catches the export of a model that its learning rate ruined, and run.export_worse without effect."""
    settings = tiny.overrides(
        "student.optimizer.lr=50", "student.scheduler.warmup_steps=0", "train.max_steps=3", teachers=1
    )
    run_here(tmp_path, settings)
    assert not (tmp_path / "final").exists()
    assert "The student is worse than before training" in (tmp_path / "report" / "report.html").read_text()
    run_here(tmp_path, [*settings, "run.resume=auto", "run.export_worse=true"])
    assert (tmp_path / "final" / "model.safetensors").exists()


def test_baseline_is_the_same_run_without_teachers(tiny: Tiny, tmp_path: Path) -> None:
    """Catches a baseline with another start, other texts or other steps, and a run that its baseline changes."""
    settings = tiny.overrides("train.max_steps=2", "data.packing=false", teachers=1)
    run_here(tmp_path / "alone", settings)
    run_here(tmp_path / "both", [*settings, "run.baseline=true"])
    alone, both, baseline = (read(tmp_path / name / "metrics.jsonl") for name in ("alone", "both", f"both/{BASELINE}"))
    assert [record["train/loss"] for record in alone[1:]] == [record["train/loss"] for record in both[1:]]
    assert baseline[0]["val/bits_per_byte"] == both[0]["val/bits_per_byte"]
    assert baseline[1]["train/ce"] == both[1]["train/ce"]
    assert "train/kd" not in baseline[1]
    page = (tmp_path / "both" / "report" / "report.html").read_text()
    assert "steps each" in page
    assert "student without teachers" in page


def test_an_interrupted_baseline_is_continued_by_the_run(tiny: Tiny, tmp_path: Path, monkeypatch) -> None:
    """Bug: the message names the baseline's folder, and continuing there starts another run."""

    def step_then_interrupt(session: off_policy.Session) -> dict[str, float]:
        if session.step > 1:
            raise KeyboardInterrupt
        return train_step(session)

    train_step = off_policy.train_step
    monkeypatch.setattr(off_policy, "train_step", step_then_interrupt)
    with pytest.raises(KeyboardInterrupt) as interrupted:
        run_here(tmp_path, tiny.overrides("train.save_every=1", "run.baseline=true", teachers=1))
    assert interrupted.value.__notes__[-1].endswith(
        f"repeat the command with run.output_dir={tmp_path} run.resume=auto"
    )
