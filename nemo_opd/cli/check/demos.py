"""A part of the check: the demos, on the GPU if there is one; the off-policy demo is also killed and resumed.

python -m nemo_opd.cli.check.demos FOLDER      # exit status 1 if a demo fails or the resumed run ends with another loss
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from nemo_opd.logging.jsonl import read

_OFF_POLICY = ("distil", "train.max_steps=40", "train.validate_every=40", "train.save_every=10")
_ON_POLICY = (
    *("distil-on-policy", "train.max_steps=3", "train.global_batch_size=16", "train.micro_batch_size=8", "rollout.n=2"),
    "evaluation.sets.held_out.data.max_samples=8",
)
_KILLED_AFTER = 20
"""Steps before the run is killed."""
_TOLERANCE = 1e-3
"""Relative error of a loss: atomic sums vary in order between runs."""


def main(folder: Path) -> int:
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
    print(json.dumps({"exit statuses": statuses, "last losses": losses}), flush=True)
    if any(statuses.values()):
        return 1
    return int(not math.isclose(losses["whole"][0], losses["parts"][0], rel_tol=_TOLERANCE))


@contextmanager
def _started(folder: Path, verb: str, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run. When the block ends, kill it and print its output."""
    device = ["cluster.device=cpu"]
    if torch.cuda.is_available():
        device = ["cluster.device=cuda", "cluster.gpus_per_node=1"]
    command = [sys.executable, "-m", "nemo_opd.cli", verb, *device, *overrides, f"run.output_dir={folder}"]
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
    sys.exit(main(Path(sys.argv[1])))
