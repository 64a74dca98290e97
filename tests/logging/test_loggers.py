"""Catches loggers that stay open after a failure, a wrong order, and a run that ends because of an output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_opd.config.run_fields import Logging
from nemo_opd.errors import ConfigError, DataError, StorageError
from nemo_opd.logging.interface import Logger
from nemo_opd.logging.loggers import Loggers, build, read
from tests.logging.synthetic import CLOSING, record, summary

SCRIPT = """
import sys
from pathlib import Path
from nemo_opd.config.run_fields import Logging
from nemo_opd.logging.loggers import build
from nemo_opd.cli.command import standard_streams
from nemo_opd.logging.terminal import print_line
from tests.logging.synthetic import CLOSING, record, summary

folder = Path(sys.argv[1])
with standard_streams(), build(Logging(), folder) as loggers:
    loggers.start(summary(folder))
    for step in range(1, 4):
        loggers.log(step, record(step))
    loggers.summary(CLOSING)
    print_line("ended: π")
"""
DISK_FULL = OSError(28, "No space left on device")


class Recorder(Logger):
    """A logger that records its calls and raises in the methods of `fail_in`."""

    def __init__(self, error: BaseException = DISK_FULL, fail_in: tuple[str, ...] = ()) -> None:
        self.error = error
        self.fail_in = fail_in
        self.calls: list[str] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail_in:
            raise self.error

    def start(self, run, step) -> None:
        self._called("start")

    def log(self, step, values) -> None:
        self._called("log")

    def summary(self, closing) -> None:
        self._called("summary")

    def close(self) -> None:
        self._called("close")


def whole_run(loggers: Loggers, folder: Path) -> None:
    with loggers:
        loggers.start(summary(folder))
        loggers.log(1, record(1))
        loggers.log(2, record(2))
        loggers.summary(CLOSING)


@pytest.mark.parametrize("fail_in", ["start", "log", "summary", "close"])
def test_every_member_is_closed_whichever_fails(tmp_path: Path, fail_in: str) -> None:
    required, optional = [Recorder(), Recorder(fail_in=(fail_in,)), Recorder()], [Recorder()]
    with pytest.raises(OSError, match="No space left"):
        whole_run(Loggers(required, optional), tmp_path)
    assert [member.calls[-1] for member in (*required, *optional)] == ["close"] * 4
    assert [member.calls.count("close") for member in (*required, *optional)] == [1] * 4


@pytest.mark.parametrize("error", [DISK_FULL, UnicodeError("π"), SystemExit(1), StorageError("no space left")])
def test_a_failure_of_an_optional_logger_is_a_warning_and_its_last_call_but_for_closing(
    error: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: StorageError, which is an OPDError, ends the run as a wrong setting does."""
    failing, working = Recorder(error, ("log", "summary", "close")), Recorder()
    whole_run(Loggers([Recorder()], [failing, working]), tmp_path)
    assert failing.calls == ["start", "log", "close"]
    assert working.calls == ["start", "log", "log", "summary", "close"]
    assert caplog.messages == [
        f"Recorder failed ({type(error).__name__}: {error}) and is switched off; the run goes on"
    ]


def test_settings_that_cannot_work_still_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no key"):
        Loggers([], [Recorder(ConfigError("no key"), ("start",))]).start(summary(tmp_path))


def test_metrics_that_cannot_be_written_still_end_the_run(tmp_path: Path) -> None:
    """Bug: the run goes on without metrics.jsonl, which it needs to resume."""
    (tmp_path / "metrics.jsonl").mkdir()
    with build(Logging(), tmp_path) as loggers, pytest.raises(DataError, match="Is a directory"):
        loggers.start(summary(tmp_path))


def test_enabled_members_all_write_into_the_output_directory(tmp_path: Path, capsys) -> None:
    settings = Logging.model_validate({"tensorboard": {"enabled": True}, "console": {"enabled": True}})
    with build(settings, tmp_path) as loggers:
        loggers.start(summary(tmp_path))
        loggers.log(1, record(1))
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, **record(1)}]
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    assert "loss 2.900" in capsys.readouterr().out


def test_building_writes_nothing_and_closing_twice_is_harmless(tmp_path: Path) -> None:
    loggers = build(Logging.model_validate({"tensorboard": {"enabled": True}}), tmp_path)
    loggers.close()
    loggers.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.world
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


def test_every_method_is_passed_on() -> None:
    """Bug: Loggers inherits an empty method, such as `warn`, so that its members are never called."""
    public = {name for name in vars(Logger) if not name.startswith("_")}
    assert public == {name for name in vars(Loggers) if not name.startswith("_")}
