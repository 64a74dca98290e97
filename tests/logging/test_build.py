"""Catches a logger left open because another one failed, and members that are missing or come in the wrong order."""

from pathlib import Path

import pytest

from nemo_opd.config.logging import Logging
from nemo_opd.logging import Loggers, build
from nemo_opd.logging.jsonl import read
from tests.logging.synthetic import CLOSING, record, summary


class Recorder:
    def __init__(self, fail_in: str = "") -> None:
        self.fail_in = fail_in
        self.calls: list[str] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fail_in:
            raise OSError(f"disk full in {name}")

    def start(self, run, step) -> None:
        self._called("start")

    def log(self, step, values) -> None:
        self._called("log")

    def summary(self, closing) -> None:
        self._called("summary")

    def close(self) -> None:
        self._called("close")


def whole_run(members: list[Recorder], folder: Path) -> None:
    with Loggers(members) as loggers:
        loggers.start(summary(folder))
        loggers.log(1, record(1))
        loggers.summary(CLOSING)


@pytest.mark.parametrize("fail_in", ["start", "log", "summary", "close"])
def test_every_member_is_closed_whichever_fails(tmp_path: Path, fail_in: str) -> None:
    members = [Recorder(), Recorder(fail_in), Recorder()]
    with pytest.raises(OSError, match=f"disk full in {fail_in}"):
        whole_run(members, tmp_path)
    assert [member.calls[-1] for member in members] == ["close"] * 3
    assert [member.calls.count("close") for member in members] == [1, 1, 1]


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
