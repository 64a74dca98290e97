"""The check of a GPU machine: what it makes of results, and the whole of it where there is no GPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from nemo_opd.cli.check.parts import Job, expected_mfu, read_counts, read_losses, read_step, read_tests, with_gpu_tests
from nemo_opd.cli.check.processes import run
from nemo_opd.cli.check.report import Outcome, Part, Report, parts_before
from tests.composition import ROOT
from tests.waiting import wait_until

PASSED, FAILED, SKIPPED = (
    '<testcase classname="a" name="right"/>',
    '<testcase classname="a" name="wrong"><failure message="no"/></testcase>',
    '<testcase classname="a" name="left"><skipped message="needs two GPUs"/></testcase>',
)


@pytest.mark.parametrize(
    ("cases", "outcome", "summary"),
    [
        ([PASSED, SKIPPED], Outcome.PASSED, "1 passed, 0 failed, 1 skipped"),
        ([PASSED, FAILED, SKIPPED], Outcome.FAILED, "1 passed, 1 failed, 1 skipped"),
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
        assert "the end of the log" in found.text
    assert ("a::left: needs two GPUs" in found.text) is (SKIPPED in cases)


@pytest.mark.parametrize(
    ("estimated", "mfu", "outcome"),
    [
        (11.9, 0.3, Outcome.PASSED),
        (12.1, 0.3, Outcome.FAILED),
        (7.9, 0.3, Outcome.FAILED),
        (10.0, 0.29, Outcome.FAILED),
    ],
)
def test_a_wrong_estimate_or_a_low_mfu_fails_the_step(
    monkeypatch: pytest.MonkeyPatch, estimated: float, mfu: float, outcome: Outcome
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    case: dict[str, Any] = {
        "student": "small",
        "teacher": "large",
        "loss": "p_kl",
        "ours": {"seconds": [1.0, 3.0, 2.0]},
        "records": [{"perf/mfu": mfu}],
        "memory": [{"what": "student", "measured_gib": 10.0, "estimated_gib": estimated}],
    }
    found = read_step({"cases": [case]}, "", 0.3)
    assert found.outcome is outcome
    assert found.facts["small ← large, p_kl"] == f"2.00 s a step, MFU {mfu:.1%}"


def test_a_host_that_waits_for_the_gpu_often_fails_the_counts() -> None:
    found = {
        "kernels": 1000,
        "copies": {"Memcpy HtoD (Pinned -> Device)": 9},
        "waits": {"a.py:1": 4},
        "microbatches": 2,
    }
    part = read_counts(found, "cuda")
    assert part.outcome is Outcome.PASSED
    assert part.summary == "500 kernels and 2.0 waits in each of 2 microbatches"
    assert part.facts["copies, Memcpy HtoD (Pinned -> Device)"] == "9"
    assert read_counts(found | {"waits": {"a.py:1": 4, "b.py:2": 1}}, "cuda").outcome is Outcome.FAILED


def test_losses_that_take_much_longer_than_their_products_fail_on_a_gpu() -> None:
    found = {"losses_s": 0.02, "products_s": 0.01, "losses / products": 2.0, "divisor": 1}
    assert read_losses(found, is_gpu=True).outcome is Outcome.FAILED
    assert read_losses(found, is_gpu=False).outcome is Outcome.PASSED
    assert read_losses(found | {"losses / products": 1.6}, is_gpu=True).facts["products"] == "10.00 ms"
    assert read_losses(found | {"losses / products": 1.6}, is_gpu=True).outcome is Outcome.PASSED


def test_the_step_is_shown_beside_the_roofline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bug: a recipe or a GPU by another name in its results, so that nothing is compared."""
    job = Job("llama_1b", "qwen_4b", 2048, 16, 4, 0.3, (), 60, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device, machine in (("NVIDIA H100 80GB HBM3", "H100 SXM"), ("NVIDIA A100-SXM4-80GB", "A100 80GB")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=device: name)
        ((label, value),) = expected_mfu(job).items()
        assert label == f"MFU by arithmetic on 1 × {machine}"
        assert 0 < float(value.rstrip("%")) < 100
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    assert expected_mfu(job) == {}


def test_files_without_gpu_tests_are_not_imported() -> None:
    """Bug: no test runs where a library is missing that one of another kind needs."""
    found = with_gpu_tests(ROOT, ["tests"])
    assert found == with_gpu_tests(ROOT, found)
    names = {Path(file).name for file in found}
    assert {"test_gpu.py", "test_transport_contract.py", "test_link.py", "test_profiled.py"} <= names
    assert not any(name.startswith("test_server") for name in names)


@pytest.mark.world
def test_a_command_that_takes_too_long_is_ended_with_its_children() -> None:
    begin = time.monotonic()
    done = run(["sh", "-c", "sleep 600 & echo $!; wait"], 1.0)
    assert time.monotonic() - begin < 30
    assert done.status is None
    assert done.reason(1.0) == "ended after 1 s, its limit"
    child = int(done.output.split()[0])
    wait_until(lambda: not psutil.pid_exists(child), "end of what it had started")


def test_parts_that_are_not_asked_for_stay_while_nothing_else_has_changed(tmp_path: Path) -> None:
    """Bug: `--only ipc` after a whole check leaves a report of one part."""
    first = Report({"commit": "a", "machine": "b", "packages": "c"})
    first.parts["tests"] = Part(Outcome.PASSED, "9 passed", {"failed": "none"})
    first.write(tmp_path)
    assert parts_before(tmp_path, first.facts) == first.parts
    assert parts_before(tmp_path, first.facts | {"commit": "another"}) == {}
    assert parts_before(tmp_path / "nothing", first.facts) == {}


@pytest.mark.world
def test_sigterm_ends_what_runs_and_says_where_the_rest_is(tmp_path: Path) -> None:
    """Bugs: a child that goes on and holds the GPU, a folder that stays, a traceback."""
    command = [sys.executable, "tools/gpu_check.py", "--only", "counts", "--output", str(tmp_path / "results")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment) as check:
        own = psutil.Process(check.pid)
        wait_until(lambda: any("profiled" in " ".join(each.cmdline()) for each in own.children()), "the part's process")
        (child,) = own.children()
        check.terminate()
        _, errors = check.communicate(timeout=60)
    assert check.returncode == 130
    assert errors.splitlines()[-1].startswith("error: interrupted; the parts before counts are in")
    wait_until(lambda: not child.is_running(), "end of the part's process")
    assert not list(tmp_path.glob("tmp*"))


@pytest.mark.nightly
@pytest.mark.world
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU, for which the tool itself is the check")
def test_without_a_gpu_all_that_can_be_done_is_done(tmp_path: Path) -> None:
    command = ["tools/gpu_check.py", "--output", str(tmp_path), "--tests", "tests/handoff/test_transport_contract.py"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    outcomes = {name: part["outcome"] for name, part in parts.items()}
    assert outcomes == {
        **dict.fromkeys(("machine", "ipc", "tests"), "skipped"),
        **dict.fromkeys(("counts", "losses", "step"), "passed"),
    }
    assert parts["ipc"]["facts"] == {"shared memory": "works"}
    assert "needs a CUDA device" in parts["tests"]["text"]
    assert (tmp_path / "gpu_check.md").read_text() in done.stdout + "\n"
