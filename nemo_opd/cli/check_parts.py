"""Parts of the check that need no checkout. Each prints a line of JSON for each finding.

python -m nemo_opd.cli.check_parts machine        # hardware, speed, and whether processes can share memory
python -m nemo_opd.cli.check_parts demos FOLDER   # the demos; the off-policy demo is also killed and resumed

The exit status is 1 if host memory cannot be shared, a demo fails, or the resumed run ends with another loss.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch

from nemo_opd.handoff.transport import probe_transport
from nemo_opd.logging.loggers import read
from nemo_opd.logits.head import product

_TIMED = 20
_SHARE = 64
"""Divisor of sizes without a GPU."""
_ROWS = 1743
"""Rows of logits computed at a time on an 80 GB GPU."""
_HEADS = ((2048, 128_256), (2560, 151_936), (2560, 151_669))
"""Width and columns: Llama-3.2-1B, Qwen3-4B, and the latter cut to its tokenizer's ids, which 8 does not divide."""
_PROGRAMS = ("gcc", "nvcc", "compute-sanitizer", "ncu", "git", "nvidia-smi")
_QUERIES = (["--query-gpu=index,driver_version,compute_mode,power.limit", "--format=csv,noheader"], ["topo", "-m"])
_OFF_POLICY = ("distil", "train.max_steps=40", "train.validate_every=40", "train.save_every=10")
_ON_POLICY = (
    *("distil-on-policy", "train.max_steps=3", "train.global_batch_size=16", "train.micro_batch_size=8", "rollout.n=2"),
    "evaluation.sets.held_out.data.max_samples=8",
)
_KILLED_AFTER = 20
"""Steps before the run is killed."""
_TOLERANCE = 1e-3
"""Relative error of a loss: atomic sums vary in order between runs."""


def _check_machine() -> int:
    has_gpu = torch.cuda.is_available()
    _print_finding(_machine())
    if has_gpu:
        _print_finding({"gpus": _gpus()})
    _print_finding({"copy, TB/s": _copy_speed(has_gpu)})
    _print_finding({"TFLOP/s": _products(has_gpu)})
    problems = _shared_memory(has_gpu)
    _print_finding({"another process reads": {name: reason or "works" for name, reason in problems.items()}})
    # The handoff works without CUDA IPC.
    return int(problems["pinned memory" if has_gpu else "shared memory"] is not None)


def _print_finding(finding: dict[str, object]) -> None:
    print(json.dumps(finding, ensure_ascii=False), flush=True)


def _machine() -> dict[str, object]:
    folders = [path for path in ("/dev/shm", "/tmp") if Path(path).is_dir()]
    return {
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda,
        "programs": [name for name in _PROGRAMS if shutil.which(name)],
        "free GiB": {path: shutil.disk_usage(path).free >> 30 for path in folders},
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def _gpus() -> dict[str, object]:
    """Return the GPUs, the pairs with peer access, and the driver's report."""
    number = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(i) for i in range(number)]
    reports: list[str] = []
    for query in _QUERIES if shutil.which("nvidia-smi") else ():
        reports.append(subprocess.run(["nvidia-smi", *query], capture_output=True, text=True).stdout.strip())
    return {
        "names": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm {gpu.major}.{gpu.minor}" for gpu in properties],
        "peers": [[i != j and torch.cuda.can_device_access_peer(i, j) for j in range(number)] for i in range(number)],
        "nvidia-smi": reports,
    }


def _milliseconds(run: Callable[[], object], *, has_gpu: bool) -> float:
    """Return the median device time, with a queue that never runs empty."""
    if not has_gpu:
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)
    run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED + 1)]
    for event in events[:-1]:
        event.record()
        run()
    events[-1].record()
    torch.cuda.synchronize()
    return sorted(first.elapsed_time(second) for first, second in pairwise(events))[_TIMED // 2]


def _copy_speed(has_gpu: bool) -> float:
    """Return the speed of a copy in TB/s, counting bytes read and written."""
    source = torch.ones(2**30 if has_gpu else 2**24, dtype=torch.uint8, device="cuda" if has_gpu else "cpu")
    target = torch.empty_like(source)
    return round(2 * source.nbytes / _milliseconds(lambda: target.copy_(source), has_gpu=has_gpu) / 1e9, 3)


def _products(has_gpu: bool) -> dict[str, dict[str, float]]:
    """Return TFLOP/s of bf16 products: a square one, and for each head the products of a block of rows."""
    share = 1 if has_gpu else _SHARE
    speeds = {}
    for rows, width, columns in ((8192, 8192, 8192), *((_ROWS, *head) for head in _HEADS)):
        sizes = rows // share, width // share, columns // share
        flops = 2 * sizes[0] * sizes[1] * sizes[2]
        speeds[f"{rows}×{width}×{columns}"] = {
            name: round(flops / _milliseconds(run, has_gpu=has_gpu) / 1e9, 3)
            for name, run in _products_of(sizes, has_gpu).items()
        }
    return speeds


def _products_of(sizes: tuple[int, int, int], has_gpu: bool) -> dict[str, Callable[[], object]]:
    """Return the products of [rows, width] hidden states, a [columns, width] head and a [rows, columns] gradient."""
    rows, width, columns = sizes
    device = "cuda" if has_gpu else "cpu"

    def draw(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(shape, device=device, dtype=torch.bfloat16)

    hidden, head, gradient = draw(rows, width), draw(columns, width), draw(rows, columns)
    products: dict[str, Callable[[], object]] = {
        "logits, bf16": lambda: hidden @ head.t(),
        "gradient of hidden states": lambda: gradient @ head,
    }
    if has_gpu:  # torch.mm has out_dtype only on CUDA
        fp32, sums = torch.float32, torch.zeros(columns, width, device=device)
        logits = torch.empty(rows, -(-columns // 64) * 64, device=device)[:, :columns]
        products |= {
            "logits, fp32": lambda: product(hidden, head.t(), logits),
            "gradient of head, added in fp32": lambda: torch.addmm(
                sums, gradient.t(), hidden, out_dtype=fp32, out=sums
            ),
        }
    return products


def _shared_memory(has_gpu: bool) -> dict[str, str | None]:
    """Return a reason for each way to share a buffer that fails, on one GPU and between two, and None for one that
    works.
    """
    limit_s = 40.0
    if not has_gpu:
        return {"shared memory": probe_transport("shared_memory", [(0, 0)], limit_s)}
    number = torch.cuda.device_count()
    pairs = [(i, j) for i in range(number) for j in range(number)]
    same, different = ([pair for pair in pairs if (pair[0] == pair[1]) is is_same] for is_same in (True, False))
    problems = {
        "pinned memory": probe_transport("pinned_memory", same, limit_s),
        "CUDA IPC, one GPU": probe_transport("cuda_ipc", same, limit_s),
    }
    return problems | ({"CUDA IPC, two GPUs": probe_transport("cuda_ipc", different, limit_s)} if different else {})


def _check_demos(folder: Path) -> int:
    with (
        _started(folder / "whole", *_OFF_POLICY) as uninterrupted,
        _started(folder / "on_policy", *_ON_POLICY) as on_policy,
    ):
        with _started(folder / "parts", *_OFF_POLICY) as parts:
            while parts.poll() is None and len(_losses(folder / "parts")) < _KILLED_AFTER:
                time.sleep(0.3)
            parts.kill()
        with _started(folder / "parts", *_OFF_POLICY, "run.resume=auto") as resumed:
            resumed.wait()
        statuses = {"whole": uninterrupted.wait(), "on-policy": on_policy.wait(), "resumed": resumed.returncode}
    losses = {name: _losses(folder / name)[-1:] for name in ("whole", "parts", "on_policy")}
    _print_finding({"exit statuses": statuses, "last losses": losses})
    if any(statuses.values()):
        return 1
    return int(not math.isclose(losses["whole"][0], losses["parts"][0], rel_tol=_TOLERANCE))


@contextmanager
def _started(folder: Path, verb: str, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run. When the block ends, kill it and print its output."""
    device = ["cluster.device=cpu"]
    if torch.cuda.is_available():
        device = ["cluster.device=cuda", "cluster.gpus_per_node=1"]
    command = [sys.executable, "-m", "nemo_opd", verb, *device, *overrides, f"run.output_dir={folder}"]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{folder.name}.log")
    with log.open("ab") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        print(f"== {folder.name}", log.read_text(encoding="utf-8", errors="replace"), sep="\n", flush=True)


def _losses(folder: Path) -> list[float]:
    """Return the losses of a run's steps so far."""
    file = folder / "metrics.jsonl"
    return [record["train/loss"] for record in read(file) if "train/loss" in record] if file.is_file() else []


if __name__ == "__main__":
    sys.exit(_check_machine() if sys.argv[1] == "machine" else _check_demos(Path(sys.argv[2])))
