"""Program that runs training steps on the pretended GPU and prints the work of the second step as JSON.

uv run python -m tests.workers.counted [settings]
uv run python -m tests.workers.counted off-policy [names of OFF_POLICY]
uv run python -m tests.workers.counted on-policy tcad grpo
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from nemo_opd.cluster.local import LocalCluster
from nemo_opd.distributed import process_group
from nemo_opd.handoff.buffer import Receiver, Sender
from nemo_opd.preflight.plan import Plan
from nemo_opd.training.models import Models
from nemo_opd.types import Batch
from tests.pretend_gpu import NAME, OnDevice, counted
from tests.tiny import Tiny, make_tiny
from tests.workers import on_policy
from tests.workers.local import first_batches, plan_of, with_micro_batch_size

OFF_POLICY = {
    "p_kl": [],
    "strict": ["loss=strict"],
    "weights by sequence": ["aggregation.weights=bits_per_byte"],
    "a sequence a document": ["data.packing=false"],
    "logits": ["handoff=logits"],
}
"""Settings, keyed by name."""
SHARDING = "torch.distributed.fsdp._fully_shard"


@contextmanager
def on_the_device() -> Iterator[None]:
    """Patch for the device: a world of one rank, storages that FSDP leaves alone, and buffers of the handoff."""
    send, last_sent, receive = Sender.tensor, Sender.last.fget, Receiver.tensor
    assert last_sent is not None

    def there(tensor: Tensor) -> OnDevice:
        return tensor if isinstance(tensor, OnDevice) else OnDevice(tensor)

    def join(*_: object) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)

    patches: dict[str, Any] = {
        f"{SHARDING}._fsdp_param.alloc_storage": lambda _: None,
        f"{SHARDING}._fsdp_param.free_storage": lambda _: None,
        f"{SHARDING}._fsdp_param_group.alloc_storage": lambda _: None,
        f"{process_group.__name__}.join": join,
        "torch.distributed.new_group": lambda *_, **__: None,
        f"{Sender.__module__}.Sender.tensor": lambda self, *arguments: there(send(self, *arguments)),
        f"{Sender.__module__}.Sender.last": property(lambda self: there(last_sent(self))),
        f"{Receiver.__module__}.Receiver.tensor": lambda self, handle: there(receive(self, handle)),
    }
    with ExitStack() as stack:
        for name, replacement in patches.items():
            stack.enter_context(patch(name, replacement))
        yield


def off_policy(tiny: Tiny, settings: list[str]) -> dict[str, Any]:
    plan = plan_of(tiny.overrides(*settings))
    return steps(plan, first_batches(plan, 2))


def on_samples(tiny: Tiny, prompts: Path, loss: str) -> dict[str, Any]:
    """loss: one of `on_policy.LOSSES`."""
    plan = with_micro_batch_size(on_policy.plan(tiny, prompts, *on_policy.LOSSES[loss]), 1)
    return steps(plan, [on_policy.batch_of(plan, seed) for seed in (1, 2)])


def steps(plan: Plan, batches: list[Batch]) -> dict[str, Any]:
    """Count the work of the last step; the first step also makes buffers that persist."""
    plan = replace(plan, device=NAME)
    with (
        on_the_device(),
        counted() as work,
        LocalCluster(plan.config.cluster, device="cpu", placement=plan.placement) as cluster,
        Models(cluster, plan) as models,
    ):
        for batch in batches:
            work.clear()
            scored = models.collect(models.submit(batch, ""))
            of_teachers = work.taken()
            microbatches = len(models._student_parts(scored)[0][2])
            models.train_step(scored, 1.0)
            of_student = work.taken()
    tokens = int(batch.student.lengths.sum())
    return {"teachers": of_teachers, "student": of_student, "microbatches": microbatches, "tokens": tokens}


def main(arguments: list[str]) -> dict[str, Any]:
    kind, *names = arguments or [""]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny = make_tiny(folder)
        if kind == "on-policy":
            prompts = on_policy.write_prompts(folder)
            return {loss: on_samples(tiny, prompts, loss) for loss in names}
        if kind == "off-policy":
            return {name: off_policy(tiny, OFF_POLICY[name]) for name in names}
        return off_policy(tiny, arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(sys.argv[1:])))
