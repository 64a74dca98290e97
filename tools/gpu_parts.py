"""Parts of gpu_check.py. Each prints a line of JSON for each result.

tools/gpu_parts.py machine         # hardware, speed, and whether processes can share memory
tools/gpu_parts.py demos FOLDER    # the demos; the off-policy demo is also killed and resumed

The exit status is 1 if host memory cannot be shared, a demo fails, or the resumed run ends with another loss.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import getoutput
from typing import Any

import torch
from torch.utils.benchmark import Timer

from nemo_opd.handoff.transport import probe_transport
from nemo_opd.logging.loggers import read
from nemo_opd.logits.head import product

HAS_GPU = torch.cuda.is_available()
DEVICE, SHARE = ("cuda", 1) if HAS_GPU else ("cpu", 64)
"""SHARE: divisor of the sizes of products."""
PRODUCTS = ((8192, 8192, 8192), (1743, 2048, 128_256), (1743, 2560, 151_936), (1743, 2560, 151_669))
"""Rows, width and columns: a square product; the heads of Llama-3.2-1B and Qwen3-4B with the rows of a block on 80 GB;
and the latter head cut to its tokenizer's ids, which 8 does not divide.
"""
OFF_POLICY = "distil train.max_steps=40 train.validate_every=40 train.save_every=10"
ON_POLICY = (
    "distil-on-policy train.max_steps=3 train.global_batch_size=16 train.micro_batch_size=8 rollout.n=2 "
    "evaluation.sets.held_out.data.max_samples=8"
)


def check_machine() -> bool:
    """Print hardware and speed, and return whether processes can share host memory; the handoff needs no CUDA IPC."""
    programs = ("gcc", "nvcc", "compute-sanitizer", "ncu", "git", "nvidia-smi")
    folders = [path for path in ("/dev/shm", "/tmp") if Path(path).is_dir()]
    _print_result(
        {
            "python": sys.version.split()[0],
            "cuda": torch.version.cuda,
            "programs": [name for name in programs if shutil.which(name)],
            "free GiB": {path: shutil.disk_usage(path).free >> 30 for path in folders},
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }
    )
    indices = range(torch.cuda.device_count())
    if HAS_GPU:
        gpus = [torch.cuda.get_device_properties(i) for i in indices]
        query = "--query-gpu=index,driver_version,compute_mode,power.limit --format=csv,noheader"
        result = {
            "names": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm {gpu.major}.{gpu.minor}" for gpu in gpus],
            "peers": [[i != j and torch.cuda.can_device_access_peer(i, j) for j in indices] for i in indices],
            "nvidia-smi": [getoutput(f"nvidia-smi {arguments}") for arguments in (query, "topo -m")],
        }
        _print_result({"gpus": result})
    source = torch.ones(2**30 // SHARE, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copy_s = _seconds(lambda: target.copy_(source))
    _print_result({"copy, TB/s": round(2e-12 * source.nbytes / copy_s, 3)})
    speeds = {f"{rows}×{width}×{columns}": _speeds(rows, width, columns) for rows, width, columns in PRODUCTS}
    _print_result({"TFLOP/s": speeds})
    host, same = ("pinned memory" if HAS_GPU else "shared memory"), [(i, i) for i in indices]
    tries = {host: (host.replace(" ", "_"), same or [(0, 0)])}
    if HAS_GPU:
        tries["CUDA IPC, one GPU"] = "cuda_ipc", same
    if different := [(i, j) for i in indices for j in indices if i != j]:
        tries["CUDA IPC, two GPUs"] = "cuda_ipc", different
    outcomes = {name: probe_transport(*arguments, limit_s=40) or "works" for name, arguments in tries.items()}
    _print_result({"another process reads": outcomes})
    return outcomes[host] == "works"


def _print_result(result: dict[str, Any]) -> None:
    print(json.dumps(result, ensure_ascii=False), flush=True)


def _seconds(run: Callable[[], object]) -> float:
    return Timer("run()", globals={"run": run}).timeit(20).mean


def _speeds(rows: int, width: int, columns: int) -> dict[str, float]:
    """Return TFLOP/s of the products of hidden states [R, D], a head [C, D] and a gradient [R, C] in bf16."""
    rows, width, columns = rows // SHARE, width // SHARE, columns // SHARE

    def draw(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)

    hidden, head, gradient = draw(rows, width), draw(columns, width), draw(rows, columns)
    products = {"logits, bf16": lambda: hidden @ head.t(), "gradient of hidden states": lambda: gradient @ head}
    if HAS_GPU:  # torch.addmm has out_dtype only on CUDA
        fp32, sums = torch.float32, torch.zeros(columns, width, device=DEVICE)
        logits = torch.empty(rows, -(-columns // 64) * 64, device=DEVICE)[:, :columns]
        products["logits, fp32"] = lambda: product(hidden, head.t(), logits)
        products["gradient of head, added in fp32"] = lambda: torch.addmm(
            sums, gradient.t(), hidden, out_dtype=fp32, out=sums
        )
    flops = 2e-12 * rows * width * columns
    return {name: round(flops / _seconds(run), 3) for name, run in products.items()}


def check_demos(folder: Path) -> bool:
    """Return whether all demos end well, and the killed and resumed one with the loss of the uninterrupted one."""
    uninterrupted, on_policy = _start(folder / "whole", OFF_POLICY), _start(folder / "on_policy", ON_POLICY)
    killed = _start(folder / "parts", OFF_POLICY)
    while killed.poll() is None and len(_losses(folder / "parts")) < 20:
        time.sleep(0.3)
    killed.kill()
    killed.wait()
    resumed = _start(folder / "parts", f"{OFF_POLICY} run.resume=auto")
    statuses = {"whole": uninterrupted.wait(), "on-policy": on_policy.wait(), "resumed": resumed.wait()}
    losses = {name: _losses(folder / name)[-1:] for name in ("whole", "parts", "on_policy")}
    _print_result({"exit statuses": statuses, "last losses": losses})
    if any(statuses.values()):
        return False
    return math.isclose(losses["whole"][0], losses["parts"][0], rel_tol=1e-3)  # atomic sums vary in order between runs


def _start(folder: Path, arguments: str) -> subprocess.Popen[bytes]:
    """Start a run. It writes to the part's output at once, which is kept if the part is stopped."""
    device = "cluster.device=cuda cluster.gpus_per_node=1" if HAS_GPU else "cluster.device=cpu"
    command = [sys.executable, "-m", "nemo_opd", *arguments.split(), *device.split(), f"run.output_dir={folder}"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def _losses(folder: Path) -> list[float]:
    """Return the losses of a run's steps so far."""
    file = folder / "metrics.jsonl"
    return [record["train/loss"] for record in read(file) if "train/loss" in record] if file.is_file() else []


if __name__ == "__main__":
    sys.exit(not (check_machine() if sys.argv[1] == "machine" else check_demos(Path(sys.argv[2]))))
