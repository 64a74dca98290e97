"""NCCL is told its GPU, and gloo none."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_opd.distributed import process_group


@pytest.mark.parametrize(("device", "bound_to"), [("cuda", torch.device("cuda", 3)), ("cpu", None)])
def test_a_world_is_bound_to_the_present_gpu(
    device: str, bound_to: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: every rank of a node begins on GPU 0, until its first collective."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: given.update(options, backend=backend))

    process_group.join(dist.HashStore(), 1, 8, device, 60.0)

    assert given["device_id"] == bound_to
    assert given["backend"] == {"cuda": "nccl", "cpu": "gloo"}[device]
