"""The check of a GPU machine: limits, processes and reports, and the whole of it where there is no GPU."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from xdist.remote import Producer

from tests.composition import ROOT
from tests.conftest import ByFile, pytest_xdist_make_scheduler
from tests.waiting import wait_until
from tools.gpu_check import Part, Report, Result, end_processes, gpu_test_files, plan, read_output, run

TESTS = """\
tests/a.py::right PASSED                                                 [ 25%]
[gw1] [ 50%] FAILED tests/a.py::wrong
{"loss": 1.5}
[gw0] [ 75%] SKIPPED tests/a.py::left (needs two GPUs)
{"half a li"""
PARTS = [part for group in plan(Path("models"), Path("scratch"), has_gpu=True) for part in group]
SKIPPED_TESTS = "\n".join(f"[gw0] [ {n}0%] SKIPPED tests/a.py::left[{n}]" for n in range(3))


def test_a_part_that_is_ended_still_reports_its_tests_and_numbers() -> None:
    """Bug: results that pytest writes at its end are lost at the limit."""
    found = read_output("FAILED: stopped at its limit of 5 s", 5.04, TESTS)
    assert found == Result("FAILED: stopped at its limit of 5 s", 5.0, "1 passed, 1 failed, 1 skipped", [{"loss": 1.5}])


def test_what_was_skipped_has_not_passed() -> None:
    assert read_output("passed", 1.0, SKIPPED_TESTS).outcome.startswith("skipped: all tests")
    assert read_output("passed", 1.0, "[gw0] [100%] PASSED tests/a.py::right").outcome == "passed"


def test_numbers_come_first_and_no_part_takes_the_time_of_all() -> None:
    """Bug: 1,800 s for each part, and the tests before the numbers."""
    names, limits = zip(*((part.name, part.limit_s) for part in PARTS), strict=True)
    first = ["machine", "models", "kernels", "step", "tests", "demos", "kernel-times", "losses"]
    assert [*names] == [*first, "ray-step", "plain-step", "gold", "liger", "runs"]
    assert max(limits) <= 240


def test_every_file_with_gpu_tests_is_in_one_part() -> None:
    """Bugs: a test that no part runs; an import of a library that this machine lacks, by files without such tests."""
    files = gpu_test_files()
    assert sorted(word for part in PARTS for word in part.command if word.startswith("tests/")) == files
    names = {Path(file).name for file in files}
    assert {"test_gpu.py", "test_transport_contract.py", "test_link.py", "test_profiled.py"} <= names
    assert not any(name.startswith("test_server") for name in names)


@pytest.mark.parametrize(("dist", "by_file"), [("load", False), ("loadfile", True)])
def test_workers_share_the_tests_of_a_file_when_asked_to(
    dist: str, by_file: bool, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: whole files for each worker whatever `--dist` says, so that the longest file is one process."""
    for name, value in {"dist": dist, "tx": ["2*popen"]}.items():
        monkeypatch.setattr(pytestconfig.option, name, value)
    assert isinstance(pytest_xdist_make_scheduler(pytestconfig, Producer("test")), ByFile) == by_file


@pytest.fixture
def run_parts(tmp_path: Path) -> Callable[..., Report]:
    def run_within(*parts: Part, within_s: float = 60.0) -> Report:
        report = Report(tmp_path, {})
        run(parts, tmp_path, report, time.monotonic() + within_s)
        return report

    return run_within


@pytest.fixture
def stubborn(tmp_path: Path) -> Iterator[tuple[Part, Path]]:
    """A part that leaves a session of its own behind, as Ray does, and the file with that process's id."""
    file = tmp_path / "pid"
    command = (sys.executable, "-m", "timeit", "-n1", "-r1", "-s", "import os, time", _LEAVING.format(file=file))
    yield Part("stubborn", 15, command), file
    end_processes("stubborn")


_LEAVING = """\
if os.fork() == 0:
    os.setsid()
    open("{file}", "w").write(str(os.getpid()))
    time.sleep(600)
print('{{"value": 1}}', flush=True)
time.sleep(600)
"""


@pytest.mark.world
def test_a_part_that_takes_too_long_is_ended_with_all_that_it_started(
    run_parts: Callable[..., Report], stubborn: tuple[Part, Path]
) -> None:
    """Bugs: a session of Ray's that keeps memory of the GPU, a pipe without an end, parts that wait for each other."""
    part, file = stubborn
    good = Part("good", 30, (sys.executable, "-m", "timeit", "-n1", "-r1", "print('{\"value\": 2}')"))
    bad = Part("bad", 30, (sys.executable, "-m", "no_such_module"))
    report = run_parts(part, good, bad)
    assert report.parts["stubborn"].outcome == "FAILED: stopped at its limit of 15 s"
    assert report.parts["stubborn"].values == [{"value": 1}]
    assert report.parts["good"] == Result("passed", report.parts["good"].seconds, "", [{"value": 2}])
    assert report.parts["bad"].outcome == "FAILED: exit status 1"
    wait_until(lambda: not psutil.pid_exists(int(file.read_text())), "end of what it had started")
    log = (report.folder / "gpu_check.log").read_text()
    assert "No module named no_such_module" in log
    assert '{"value": 2}' in log


def test_nothing_begins_that_has_no_time_left(run_parts: Callable[..., Report]) -> None:
    report = run_parts(Part("late", 30, (sys.executable, "-m", "no_such_module")), within_s=20.0)
    assert report.parts["late"].outcome == "skipped: no time left"


def test_a_part_that_cannot_run_is_skipped(run_parts: Callable[..., Report]) -> None:
    """Bug: on a machine without TRL the check fails, or passes as if GOLD had been measured."""
    report = run_parts(Part("other", 30, (sys.executable, "-m", "no_such_module"), skip="trl is not installed"))
    assert report.parts["other"] == Result("skipped: trl is not installed")


@pytest.mark.world
def test_sigterm_ends_what_runs_and_says_where_the_rest_is(tmp_path: Path) -> None:
    """Bugs: a child that goes on and holds the GPU, a folder that stays, a traceback."""
    command = [sys.executable, "tools/gpu_check.py", "--only", "machine", "--output", str(tmp_path / "results")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment) as process:
        own = psutil.Process(process.pid)
        wait_until(
            lambda: any("gpu_parts" in " ".join(each.cmdline()) for each in own.children()), "the part's process"
        )
        (child,) = own.children()
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1].startswith("error: interrupted; results of finished parts are in")
    wait_until(lambda: not child.is_running(), "end of the part's process")
    assert not list(tmp_path.glob("nemo_opd*"))


@pytest.mark.nightly
@pytest.mark.world
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU, for which the tool itself is the check")
def test_without_a_gpu_all_that_can_be_done_is_done(tmp_path: Path) -> None:
    command = ["tools/gpu_check.py", "--output", str(tmp_path), "--within", "3600"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    outcomes = {name: part["outcome"].partition(":")[0] for name, part in parts.items()}
    skipped = {"tests", "kernel-times", "runs"} | (set() if find_spec("liger_kernel") else {"liger"})
    assert outcomes == {part.name: "skipped" if part.name in skipped else "passed" for part in PARTS}
    assert parts["step"]["values"]
    assert parts["gold"]["values"][-1]["ours / GOLD"] > 0
    assert "needs a CUDA device" in (tmp_path / "gpu_check.log").read_text()
