"""The GPU of a process group, and a store that has ended."""

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_opd.cluster.local import _World
from nemo_opd.cluster.placement import Processes
from nemo_opd.cluster.ray.ray_cluster import RankActor
from nemo_opd.distributed import process_group


@pytest.mark.parametrize(("device", "bound_to"), [("cuda", torch.device("cuda", 3)), ("cpu", None)])
def test_a_world_is_bound_to_the_present_gpu(
    device: str, bound_to: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: every rank of a node uses GPU 0 until its first collective."""
    arguments: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **options: arguments.update(options, backend=backend)
    )

    process_group.join(dist.HashStore(), 1, 8, device, 60.0)

    assert arguments["device_id"] == bound_to
    assert arguments["backend"] == {"cuda": "nccl", "cpu": "gloo"}[device]


def test_a_rank_of_ray_takes_the_one_gpu_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: LOCAL_RANK is the driver's, so libraries look for a GPU that the actor does not see."""
    monkeypatch.setenv("LOCAL_RANK", "5")
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr("gc.disable", lambda: None)

    RankActor(3, 8, "cuda", torch.get_num_threads(), 60.0, None, {}, b"key")

    assert devices == [0]
    assert os.environ["LOCAL_RANK"] == "0"


def test_a_rank_of_torchrun_takes_its_gpu_before_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the world is joined first, so NCCL guesses the GPU."""
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(process_group, "stay_on_this_machine", lambda: None)
    monkeypatch.setattr(process_group, "join", lambda *_: calls.append("joined"))
    monkeypatch.setattr(dist, "new_group", lambda **_: None)

    _World(Processes(rank=3, size=4, local_rank=1), dist.HashStore(), "cuda", 60.0)

    assert calls == [1, "joined"]


def test_a_store_that_has_ended_is_refused_without_a_stack(capfd: pytest.CaptureFixture[str]) -> None:
    """Bug: PyTorch retries for seconds and prints a C++ stack after the last line of an interrupted run."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    with pytest.raises(dist.DistNetworkError, match=f"no store answers at 127.0.0.1:{port}: .*refused"):
        process_group.connect_store("127.0.0.1", port, 60.0)

    assert capfd.readouterr().err == ""
