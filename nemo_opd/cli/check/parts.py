"""The parts of the check. Each returns what it found, whatever goes wrong in it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from shutil import disk_usage
from typing import Any
from xml.etree import ElementTree

import torch

from nemo_opd.cli.check.processes import run
from nemo_opd.cli.check.report import Outcome, Part
from nemo_opd.handoff.obstacle import obstacle
from nemo_opd.paths import CHECKOUT

_WITHIN = 0.2
"""Error that the memory estimate promises not to exceed."""
_MOST_WAITS = 2
"""Waits of the host for the device in a microbatch."""
_LEAST_SHARE = 0.6
"""Share of the time of losses on a GPU that the products with their heads alone take."""
_OF_THE_ROOFLINE = ("llama_1b", "qwen_4b")
"""Student and teacher of `benchmarks/roofline.py`'s recipe `1B from 4B`."""
_NO_GPU = Part(Outcome.NOT_HERE, "PyTorch sees no GPU")
_NO_CHECKOUT = Part(Outcome.NOT_HERE, "needs a checkout of the project: the package has no tests and no benchmarks")


@dataclass(frozen=True)
class Job:
    """Arguments of the parts."""

    student: str
    teacher: str
    length: int
    """Tokens of a text of the measured step."""
    rows: int
    """Texts of a step."""
    micro: int
    """Texts at a time."""
    mfu_floor: float
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
    """Report the GPUs, their driver and links, and the memory that processes share."""
    shared = f"{disk_usage('/dev/shm').free / 2**30:.1f} GiB free"
    if not torch.cuda.is_available():
        return replace(_NO_GPU, facts={"/dev/shm": shared})
    done = run([sys.executable, "-m", "nemo_opd.cli.check.probe"], job.limit_s)
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
    """Try how another process can read buffers: by CUDA IPC, on the same GPU and on another, and in main memory.

    Where one is impossible the handoff takes the other, so that only main memory must work.
    """
    if not torch.cuda.is_available():
        reason = obstacle("shared_memory", [(0, 0)], job.limit_s)
        return replace(_NO_GPU, facts={"shared memory": reason or "works"})
    number = torch.cuda.device_count()
    pairs = [(i, j) for i in range(number) for j in range(number)]
    same, other = ([pair for pair in pairs if (pair[0] == pair[1]) is is_same] for is_same in (True, False))
    tries = {"CUDA IPC, one GPU": ("cuda_ipc", same), "CUDA IPC, two GPUs": ("cuda_ipc", other)}
    tries["pinned main memory"] = ("pinned_memory", same)
    found = {name: obstacle(*given, job.limit_s) for name, given in tries.items() if given[1]}
    facts = {name: reason or "works, also after the buffer has grown" for name, reason in found.items()}
    outcome = Outcome.FAILED if found["pinned main memory"] else Outcome.PASSED
    return Part(outcome, "; ".join(f"{name}: {'no' if reason else 'yes'}" for name, reason in found.items()), facts)


@_timed
def tests(job: Job) -> Part:
    """Run the tests marked `gpu`. A test that is skipped is listed with its reason."""
    if CHECKOUT is None:
        return _NO_CHECKOUT
    file = job.scratch / "tests.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-n",
        "0",
        f"--junitxml={file}",
        *with_gpu_tests(CHECKOUT, job.tests),
    ]
    done = run(command, job.limit_s)
    if not file.exists():
        return Part(Outcome.FAILED, done.reason(job.limit_s), text=done.end)
    return read_tests(file, done.end)


def with_gpu_tests(root: Path, paths: Sequence[str]) -> list[str]:
    """Return the files of tests that have some marked `gpu`: others may need libraries that this machine lacks."""
    named = [root / path for path in paths]
    files = (file for path in named for file in ([path] if path.is_file() else path.rglob("*.py")))
    return sorted(str(file) for file in files if "pytest.mark.gpu" in file.read_text(encoding="utf-8"))


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
    outcome = Outcome.PASSED if by_kind["passed"] else Outcome.NOT_HERE
    outcome = Outcome.FAILED if by_kind["failed"] else outcome
    text = "\n".join([*by_kind["skipped"], *([end] if by_kind["failed"] else [])])
    return Part(outcome, counts, {"failed": ", ".join(by_kind["failed"]) or "none"}, text)


@_timed
def losses(job: Job) -> Part:
    """Time cross-entropy, same_vocab and p_kl against their products (`benchmarks/losses_floor.py`)."""
    if CHECKOUT is None:
        return _NO_CHECKOUT
    on_gpu = torch.cuda.is_available()
    sizes = ("--device", "cuda", "--positions", "8192") if on_gpu else ("--positions", "16", "--divisor", "64")
    done = run([sys.executable, "benchmarks/losses_floor.py", *sizes, "--output", str(job.scratch)], job.limit_s)
    if done.status != 0:
        return Part(Outcome.FAILED, done.reason(job.limit_s), text=done.end)
    return read_losses(json.loads((job.scratch / "losses_floor.json").read_text()), is_gpu=on_gpu)


def read_losses(found: dict[str, Any], *, is_gpu: bool) -> Part:
    """Read the benchmark's results; on a GPU the products must be most of the time."""
    share = 1 / found["losses / products"]
    facts = {name: f"{1e3 * found[key]:.2f} ms" for name, key in (("losses", "losses_s"), ("products", "products_s"))}
    facts["widths and vocabularies divided by"] = str(found["divisor"])
    summary = f"products are {share:.0%} of the time of cross-entropy, same_vocab and p_kl"
    if is_gpu and share < _LEAST_SHARE:
        return Part(Outcome.FAILED, f"{summary}, less than {_LEAST_SHARE:.0%}", facts)
    return Part(Outcome.PASSED, summary, facts)


@_timed
def step(job: Job) -> Part:
    """Measure time, MFU and memory of a training step with random weights (`benchmarks/step.py`)."""
    if CHECKOUT is None:
        return _NO_CHECKOUT
    output = job.scratch / "step"
    in_one_process = () if torch.cuda.is_available() else ("--set", "cluster.launcher=local")
    done = run(
        [
            *(sys.executable, "benchmarks/step.py", "--without-gold", "--loss", "p_kl", "--rounds", "3"),
            *("--output", str(output)),
            *("--student", job.student, "--teacher", job.teacher, "--length", str(job.length)),
            *("--rows", str(job.rows), "--micro", str(job.micro)),
            *in_one_process,
        ],
        job.limit_s,
    )
    if done.status != 0:
        return Part(Outcome.FAILED, done.reason(job.limit_s), text=done.end)
    found = json.loads((output / "step.json").read_text())
    part = read_step(found, (output / "step.md").read_text(), job.mfu_floor)
    return replace(part, facts=part.facts | expected_mfu(job))


def expected_mfu(job: Job) -> dict[str, str]:
    """Return the MFU of this step by `benchmarks/roofline.py`, if it has such a GPU and these models."""
    if not torch.cuda.is_available() or CHECKOUT is None or (job.student, job.teacher) != _OF_THE_ROOFLINE:
        return {}
    device = torch.cuda.get_device_name()
    rows = json.loads((CHECKOUT / "benchmarks" / "results" / "roofline.json").read_text())["recipes"]
    return {
        f"MFU by arithmetic on {row['machine']}": f"{row['mfu']:.1%}"
        for row in rows
        if row["recipe"] == "1B from 4B" and row["machine"].startswith("1 × ") and row["machine"].split()[2] in device
    }


def read_step(found: dict[str, object], text: str, mfu_floor: float) -> Part:
    """Read the benchmark's results.

    Where there is a GPU, the estimate of memory must be within a fifth of what was measured, and the median MFU at
    least `mfu_floor`.
    """
    cases = found["cases"]
    assert isinstance(cases, list)
    facts: dict[str, str] = {}
    wrong: list[str] = []
    for case in cases:
        name = f"{case['student']} ← {case['teacher']}, {case['loss']}"
        seconds = sorted(case["ours"]["seconds"])[len(case["ours"]["seconds"]) // 2]
        by_step = sorted(record["perf/mfu"] for record in case["records"] if "perf/mfu" in record)
        mfu = by_step[len(by_step) // 2] if by_step else None
        facts[name] = f"{seconds:.2f} s a step" + ("" if mfu is None else f", MFU {mfu:.1%}")
        if mfu is not None and mfu < mfu_floor:
            wrong.append(f"{name}: MFU {mfu:.1%} is below {mfu_floor:.0%}")
        for one in case["memory"]:
            measured, estimated = one["measured_gib"], one["estimated_gib"]
            facts[f"{name}: {one['what']}"] = f"{measured:.2f} GiB measured, {estimated:.2f} GiB estimated"
            # The libraries of a CPU process are not in the estimate.
            if torch.cuda.is_available() and abs(estimated / measured - 1) > _WITHIN:
                wrong.append(f"{name}: {one['what']}: the memory estimate is off by more than {_WITHIN:.0%}")
    if wrong:
        return Part(Outcome.FAILED, "; ".join(wrong), facts, text)
    return Part(Outcome.PASSED, "; ".join(f"{name}: {value}" for name, value in list(facts.items())[:1]), facts, text)


@_timed
def counts(job: Job) -> Part:
    """Count kernels, copies and waits of a step of tiny models, by PyTorch's profiler."""
    if CHECKOUT is None:
        return _NO_CHECKOUT
    device = "cuda" if torch.cuda.is_available() else "cpu"
    done = run([sys.executable, "-m", "tests.workers.profiled", device], job.limit_s)
    if done.status != 0:
        return Part(Outcome.FAILED, done.reason(job.limit_s), text=done.end)
    return read_counts(json.loads(done.output.splitlines()[-1]), device)


def read_counts(found: dict[str, Any], device: str) -> Part:
    """Read what the profiler saw; the host may wait twice in a microbatch."""
    number, waits = found["microbatches"], sum(found["waits"].values())
    noun = "kernels" if device == "cuda" else "operations"
    facts = {f"{noun} in a microbatch": f"{found['kernels'] / number:.0f}"}
    facts |= {f"copies, {name}": str(count) for name, count in found["copies"].items()}
    facts |= {f"waits at {place}": str(count) for place, count in found["waits"].items()}
    summary = f"{found['kernels'] / number:.0f} {noun} and {waits / number:.1f} waits in each of {number} microbatches"
    return Part(Outcome.PASSED if waits <= _MOST_WAITS * number else Outcome.FAILED, summary, facts)


CHECKS: dict[str, _Check] = {
    "machine": machine,
    "ipc": ipc,
    "tests": tests,
    "counts": counts,
    "losses": losses,
    "step": step,
}
