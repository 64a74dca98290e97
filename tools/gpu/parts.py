"""The parts of the check. Each returns what it found, whatever goes wrong in it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from shutil import disk_usage
from xml.etree import ElementTree

import torch

from tools.gpu.processes import run
from tools.gpu.report import Outcome, Part

WITHIN = 0.2
"""What the memory estimate promises."""
_NO_GPU = Part(Outcome.NOT_HERE, "PyTorch sees no GPU")


@dataclass(frozen=True)
class Job:
    """What the parts are asked for."""

    student: str
    teacher: str
    length: int
    """Tokens of a text of the measured step."""
    tests: tuple[str, ...]
    limit_s: float
    scratch: Path


_Check = Callable[[Job], Part]


def _timed(check: _Check) -> _Check:
    """Add the seconds, and make a failed part of an error."""

    @wraps(check)
    def part(job: Job) -> Part:
        begin = time.perf_counter()
        try:
            found = check(job)
        except Exception as error:
            found = Part(Outcome.FAILED, f"{type(error).__name__}: {error}")
        return replace(found, seconds=time.perf_counter() - begin)

    return part


@_timed
def machine(job: Job) -> Part:
    """GPUs, driver, links between them, and memory that processes share."""
    shared = f"{disk_usage('/dev/shm').free / 2**30:.1f} GiB free"
    if not torch.cuda.is_available():
        return replace(_NO_GPU, facts={"/dev/shm": shared})
    done = run([sys.executable, "-m", "tools.gpu.probe", "devices"], job.limit_s)
    if done.status != 0:
        return Part(Outcome.FAILED, done.reason(job.limit_s), text=done.end)
    found = json.loads(done.output.splitlines()[-1])
    names = [f"{each['name']}, {each['gib']:.0f} GiB, sm {each['capability']}" for each in found["devices"]]
    reached = sum(map(sum, found["peers"]))
    facts = {f"GPU {i}": name for i, name in enumerate(names)} | {
        "CUDA of PyTorch": found["cuda"],
        "pairs with peer access": f"{reached} of {len(names) * (len(names) - 1)}",
        "/dev/shm": shared,
    }
    text = ""
    fields = "index,driver_version,compute_mode,ecc.mode.current,power.limit"
    for command in (["nvidia-smi", f"--query-gpu={fields}", "--format=csv"], ["nvidia-smi", "topo", "-m"]):
        try:
            text += run(command, job.limit_s).output + "\n"
        except OSError as error:
            text += f"{error}\n"
    return Part(Outcome.PASSED, "; ".join(names), facts, text)


@_timed
def ipc(job: Job) -> Part:
    """Whether another process can map a buffer on the GPU, as the handoff needs it."""
    if not torch.cuda.is_available():
        return _NO_GPU
    done = run([sys.executable, "-m", "tools.gpu.probe", "ipc"], job.limit_s)
    if done.status != 0:
        return Part(Outcome.FAILED, done.reason(job.limit_s), text=done.end)
    return Part(Outcome.PASSED, "another process reads buffers on the GPU, also after they have grown")


@_timed
def tests(job: Job) -> Part:
    """Tests marked `gpu`. A test that is skipped is listed with its reason."""
    file = job.scratch / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", f"--junitxml={file}", *job.tests]
    done = run(command, job.limit_s)
    if not file.exists():
        return Part(Outcome.FAILED, done.reason(job.limit_s), text=done.end)
    return read_tests(file, done.end)


def read_tests(file: Path, end: str) -> Part:
    """Read pytest's results; where all are skipped, nothing has been tested. end: of what it printed."""
    by_kind: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in ElementTree.parse(file).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        wrong = [case.find("failure"), case.find("error")]
        skipped = case.find("skipped")
        if any(each is not None for each in wrong):
            by_kind["failed"].append(name)
        elif skipped is not None:
            by_kind["skipped"].append(f"{name}: {skipped.get('message')}")
        else:
            by_kind["passed"].append(name)
    counts = ", ".join(f"{len(names)} {kind}" for kind, names in by_kind.items())
    if by_kind["failed"]:
        outcome, text = Outcome.FAILED, end
    else:
        outcome = Outcome.PASSED if by_kind["passed"] else Outcome.NOT_HERE
        text = "\n".join(by_kind["skipped"])
    return Part(outcome, counts, {"failed": ", ".join(by_kind["failed"]) or "none"}, text)


@_timed
def step(job: Job) -> Part:
    """Time, MFU and memory of a training step with random weights (`benchmarks/step.py`)."""
    output = job.scratch / "step"
    done = run(
        [
            *(sys.executable, "benchmarks/step.py", "--without-gold", "--loss", "p_kl", "--rounds", "3"),
            *("--output", str(output)),
            *("--student", job.student, "--teacher", job.teacher, "--length", str(job.length)),
        ],
        job.limit_s,
    )
    if done.status != 0:
        return Part(Outcome.FAILED, done.reason(job.limit_s), text=done.end)
    return read_step(json.loads((output / "step.json").read_text()), (output / "step.md").read_text())


def read_step(found: dict[str, object], text: str) -> Part:
    """Read the benchmark's results; the estimate of memory must be within a fifth of what was measured."""
    cases = found["cases"]
    assert isinstance(cases, list)
    facts, wrong = {}, []
    for case in cases:
        name = f"{case['student']} ← {case['teacher']}, {case['loss']}"
        seconds = sorted(case["ours"]["seconds"])[len(case["ours"]["seconds"]) // 2]
        mfu = [record["perf/mfu"] for record in case["records"] if "perf/mfu" in record]
        facts[name] = f"{seconds:.2f} s a step" + (f", MFU {sorted(mfu)[len(mfu) // 2]:.1%}" if mfu else "")
        for one in case["memory"]:
            measured, estimated = one["measured_gib"], one["estimated_gib"]
            facts[f"{name}: {one['what']}"] = f"{measured:.2f} GiB measured, {estimated:.2f} GiB estimated"
            # The libraries of a CPU process are not in the estimate.
            if torch.cuda.is_available() and abs(estimated / measured - 1) > WITHIN:
                wrong.append(f"{name}: {one['what']}")
    if wrong:
        return Part(
            Outcome.FAILED, f"the memory estimate is off by more than {WITHIN:.0%}: {', '.join(wrong)}", facts, text
        )
    return Part(Outcome.PASSED, "; ".join(f"{name}: {value}" for name, value in list(facts.items())[:1]), facts, text)


PARTS: dict[str, _Check] = {"machine": machine, "ipc": ipc, "tests": tests, "step": step}
