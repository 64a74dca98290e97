"""Catches a run that ends, with status 0 or without a word, because nobody reads its console any more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_opd.config.logging import Logging
from nemo_opd.errors import ConfigError, StorageError
from nemo_opd.logging import Logger, Loggers, build
from nemo_opd.logging.jsonl import read
from nemo_opd.logging.tolerated import Tolerated
from tests.logging.synthetic import CLOSING, summary

SCRIPT = """
import sys
from pathlib import Path
from nemo_opd.config.logging import Logging
from nemo_opd.logging import build
from nemo_opd.training.cli import say, standard_streams
from tests.logging.synthetic import CLOSING, record, summary

folder = Path(sys.argv[1])
with standard_streams(), build(Logging(), folder) as loggers:
    loggers.start(summary(folder))
    for step in range(1, 4):
        loggers.log(step, record(step))
    loggers.summary(CLOSING)
    say("ended: π")
"""


class Failing(Logger):
    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.calls: list[str] = []

    def _fail(self, name: str) -> None:
        self.calls.append(name)
        raise self.error

    def start(self, run, step) -> None:
        self._fail("start")

    def log(self, step, values) -> None:
        self._fail("log")

    def summary(self, closing) -> None:
        self._fail("summary")

    def close(self) -> None:
        self._fail("close")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), UnicodeError("π"), SystemExit(1)])
def test_a_failure_is_a_warning_and_the_last_call_but_for_closing(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(error)
    logger = Tolerated(failing)
    logger.log(1, {})
    logger.log(2, {})
    logger.summary(CLOSING)
    logger.close()
    assert failing.calls == ["log", "close"]
    [warning] = caplog.messages
    assert warning.startswith(f"Failing failed ({type(error).__name__}: {error})")


def test_settings_that_cannot_work_still_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no key"):
        Tolerated(Failing(ConfigError("no key"))).start(summary(tmp_path), 0)


def test_a_full_disk_under_an_optional_logger_ends_its_output(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of our own errors, too: nothing in the settings is wrong."""
    Tolerated(Failing(StorageError("no space left"))).start(summary(tmp_path), 0)
    assert caplog.messages == ["Failing failed (StorageError: no space left) and is switched off; the run goes on"]


def test_metrics_that_cannot_be_written_still_end_the_run(tmp_path: Path) -> None:
    """They are results, and what a run continues from."""
    (tmp_path / "metrics.jsonl").mkdir()
    with build(Logging(), tmp_path) as loggers, pytest.raises(StorageError, match="Is a directory"):
        loggers.start(summary(tmp_path))


@pytest.mark.parametrize("stdout", ["full disk", "closed pipe", "closed", "ascii"])
def test_a_run_whose_stdout_takes_nothing_more_ends_well_with_all_its_metrics(tmp_path: Path, stdout: str) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii:strict" if stdout == "ascii" else "utf-8"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    redirection = {"full disk": ">/dev/full", "closed pipe": "| true", "closed": ">&-", "ascii": ">/dev/null"}[stdout]
    shell = ["bash", "-c", f'set -o pipefail; "$@" {redirection}', "bash", *command]
    done = subprocess.run(shell, env=environment, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert [values["step"] for values in read(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    warnings = [line for line in done.stderr.splitlines() if "switched off" in line]
    assert "Traceback" not in done.stderr
    assert len(warnings) == (stdout in ("full disk", "closed pipe")), done.stderr


@pytest.mark.parametrize("passing_on", [Tolerated, Loggers])
def test_all_that_a_logger_is_told_is_passed_on(passing_on: type[Logger]) -> None:
    """Bug: what a logger need not implement, such as a warning, ends in the wrapper's own empty method."""
    told = {name for name in vars(Logger) if not name.startswith("_")}
    assert told == {name for name in vars(passing_on) if not name.startswith("_")}
