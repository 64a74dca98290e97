"""The check of a GPU machine: what it makes of results, and the whole of it where there is no GPU."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.composition import ROOT
from tests.waiting import wait_until
from tools.gpu.parts import read_step, read_tests
from tools.gpu.processes import run
from tools.gpu.report import Outcome

PASSED, FAILED, SKIPPED = (
    '<testcase classname="a" name="right"/>',
    '<testcase classname="a" name="wrong"><failure message="no"/></testcase>',
    '<testcase classname="a" name="left"><skipped message="needs two GPUs"/></testcase>',
)


@pytest.mark.parametrize(
    ("cases", "outcome", "summary"),
    [
        ([PASSED, SKIPPED], Outcome.PASSED, "1 passed, 0 failed, 1 skipped"),
        ([PASSED, FAILED], Outcome.FAILED, "1 passed, 1 failed, 0 skipped"),
        ([SKIPPED], Outcome.NOT_HERE, "0 passed, 0 failed, 1 skipped"),
        ([], Outcome.NOT_HERE, "0 passed, 0 failed, 0 skipped"),
    ],
)
def test_what_was_skipped_has_not_passed(tmp_path: Path, cases: list[str], outcome: Outcome, summary: str) -> None:
    file = tmp_path / "tests.xml"
    file.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    found = read_tests(file, "the end of the log")
    assert (found.outcome, found.summary) == (outcome, summary)
    if FAILED in cases:
        assert found.facts["failed"] == "a::wrong"
    elif SKIPPED in cases:
        assert found.text == "a::left: needs two GPUs"


@pytest.mark.parametrize(
    ("estimated", "outcome"), [(11.9, Outcome.PASSED), (12.1, Outcome.FAILED), (7.9, Outcome.FAILED)]
)
def test_a_wrong_estimate_fails_the_step(monkeypatch: pytest.MonkeyPatch, estimated: float, outcome: Outcome) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    case: dict[str, Any] = {
        "student": "small",
        "teacher": "large",
        "loss": "p_kl",
        "ours": {"seconds": [1.0, 3.0, 2.0]},
        "records": [{"perf/mfu": 0.25}],
        "memory": [{"what": "student", "measured_gib": 10.0, "estimated_gib": estimated}],
    }
    found = read_step({"cases": [case]}, "")
    assert found.outcome is outcome
    assert found.facts["small ← large, p_kl"] == "2.00 s a step, MFU 25.0%"


@pytest.mark.world
def test_a_command_that_takes_too_long_is_ended_with_its_children() -> None:
    begin = time.monotonic()
    done = run(["sh", "-c", "sleep 600 & echo $!; wait"], 1.0)
    assert time.monotonic() - begin < 30
    assert done.status is None
    assert done.reason(1.0) == "ended after 1 s, its limit"
    child = int(done.output.split()[0])
    wait_until(lambda: not psutil.pid_exists(child), "end of what it had started")


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU, for which the tool itself is the check")
def test_without_a_gpu_all_that_can_be_done_is_done(tmp_path: Path) -> None:
    command = ["tools/gpu_check.py", "--output", str(tmp_path), "--tests", "tests/handoff/test_transport_contract.py"]
    models = ["--student", "llama_tiny", "--teacher", "qwen_tiny", "--length", "32"]
    done = subprocess.run([sys.executable, *command, *models], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    outcomes = {name: part["outcome"] for name, part in parts.items()}
    assert outcomes == {**dict.fromkeys(("machine", "ipc", "tests"), "not on this machine"), "step": "passed"}
    assert "needs a CUDA device" in parts["tests"]["text"]
    assert (tmp_path / "gpu_check.md").read_text() in done.stdout + "\n"
