"""The summary that a command prints after its runs."""

from pathlib import Path

import pytest

from nemo_opd.cli.runs import report_sweep
from tests.logging.test_sweep import write_run


def test_a_sweep_of_dry_runs_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: a folder with an empty table is written."""
    report_sweep(tmp_path / "sweep", ["seed=1", "seed=2"])
    assert not (tmp_path / "sweep").exists()
    assert capsys.readouterr().out == ""


def test_a_sweep_has_a_row_for_the_run_that_was_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "seed=1", 1.5)
    report_sweep(tmp_path, ["seed=1", "seed=2"])
    out = capsys.readouterr().out
    assert "seed=2" in out
    assert f"report  {tmp_path / 'report.html'}" in out
    assert (tmp_path / "report.html").is_file()
