"""Program that runs training steps on a real device and prints the work of the third step as JSON.

python -m tests.workers.profiled [cuda | cpu] [settings]

`tests.workers.counted` counts the same on a pretended GPU.
"""

import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from nemo_opd.cluster.local import LocalCluster
from nemo_opd.training.models import Models
from tests.tiny import make_tiny
from tests.workers.local import first_batches, plan_of

STEPS = 3


@contextmanager
def watched(device: str) -> Iterator[Counter[str]]:
    """Count the places at which the host waits for the device, except in calls that only wait."""
    waits: Counter[str] = Counter()
    if device == "cpu":
        yield waits
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield waits
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    waits.update(
        f"{warning.filename}:{warning.lineno}" for warning in caught if "synchronizing" in str(warning.message)
    )


def work_of(events: Any, device: str) -> dict[str, Any]:
    """Return the number of kernels (of operations on a CPU) and of copies of each kind."""
    if device == "cpu":
        return {"kernels": sum(event.name.startswith("aten::") for event in events), "copies": {}}
    names = [e.name for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    copies = Counter(name for name in names if name.startswith("Memcpy"))
    fills = sum(name.startswith("Memset") for name in names)
    return {"kernels": len(names) - sum(copies.values()) - fills, "copies": dict(copies)}


def main(device: str, settings: list[str]) -> dict[str, Any]:
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    local = ["cluster.launcher=local", f"cluster.device={device}"]
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_of(make_tiny(Path(folder)).overrides(*local, *settings))
        batches = first_batches(plan, STEPS)
        with (
            LocalCluster(plan.config.cluster, device=plan.device, placement=plan.placement) as cluster,
            Models(cluster, plan) as models,
        ):
            for batch in batches[:-1]:
                models.train_step(models.collect(models.submit(batch, "")), 1.0)
            scored = models.collect(models.submit(batches[-1], ""))
            microbatches = len(models._student_parts(scored)[0][2])
            with profile(activities=kinds) as profiled, watched(device) as waits:
                models.train_step(scored, 1.0)
    return {**work_of(profiled.events(), device), "waits": dict(waits), "microbatches": microbatches}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1] if len(sys.argv) > 1 else "cuda", sys.argv[2:])))
