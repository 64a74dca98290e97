"""Limits of a machine's GPUs and shared memory are reported before anything starts."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from nemo_opd.cluster.placement import Placement
from nemo_opd.config import RunConfig
from nemo_opd.config.cluster import Cluster
from nemo_opd.config.rollout import ServerRollout
from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ConfigError
from nemo_opd.preflight import ranks
from nemo_opd.preflight.ranks import require_shared_gpus, warn_of_shared_memory
from tests.composition import compose

pytestmark = pytest.mark.world

TWO_ON_EACH = Placement.colocated(num_nodes=1, ranks_per_node=2, num_teachers=1)
APART = Placement.separate(num_nodes=1, student_per_node=1, teachers_per_node=[1])


def config(rollout: ServerRollout | None = None, **cluster: Any) -> RunConfig:
    return compose().model_copy(update={"cluster": Cluster(**cluster), "rollout": rollout})


@pytest.fixture
def exclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an nvidia-smi first in PATH that lists two GPUs; the second takes only one process."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n[ $1 = --query-gpu=index,compute_mode ] && echo 0, Default && echo 1, Exclusive_Process\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.usefixtures("exclusive")
def test_a_gpu_that_takes_one_process_is_refused_to_two() -> None:
    with pytest.raises(ConfigError) as caught:
        require_shared_gpus(config(), "cuda", TWO_ON_EACH)
    message = str(caught.value)
    assert message.startswith("cluster.placement=colocated: GPU 1 is in the compute mode Exclusive_Process")
    assert "the run has 2 per GPU; change the mode with `nvidia-smi -i 1 -c DEFAULT`" in message


@pytest.mark.usefixtures("exclusive")
def test_one_process_per_gpu_is_allowed() -> None:
    require_shared_gpus(config(), "cuda", APART)
    require_shared_gpus(config(launcher="local"), "cuda", TWO_ON_EACH)
    require_shared_gpus(config(), "cpu", TWO_ON_EACH)
    require_shared_gpus(config(ServerRollout(gpus=1)), "cuda", APART)


@pytest.mark.usefixtures("exclusive")
def test_a_server_is_a_process_too() -> None:
    for launcher, placement in (("ray", APART), ("local", TWO_ON_EACH)):
        with pytest.raises(ConfigError, match="the run has 2 per GPU"):
            require_shared_gpus(config(ServerRollout(), launcher=launcher), "cuda", placement)


def test_without_nvidia_smi_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    require_shared_gpus(config(), "cuda", TWO_ON_EACH)


@pytest.mark.parametrize(
    ("device", "layouts", "need"),
    [
        ("cuda", [Layout(8), Layout(8)], 160),  # one communicator, shared with the data-parallel axis
        ("cuda", [Layout(4, tp=2), Layout(1, tp=8)], 480),
        ("cuda", [Layout(1), Layout(1)], 0),  # one rank talks to nobody
        ("cpu", [Layout(8)], 0),
    ],
    ids=str,
)
def test_dockers_shared_memory_is_too_small_for_several_gpus(
    device: str, layouts: list[Layout], need: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MiB. Bug: the run fails minutes later in NCCL, with a message that does not name shared memory."""
    monkeypatch.setattr(ranks.shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(64 * 2**20))
    warnings = warn_of_shared_memory(device, layouts, 1)
    assert len(warnings) == (need > 0)
    if need:
        assert f"/dev/shm has 64 MiB free, and NCCL may need {need} MiB there" in warnings[0]
        assert "--shm-size=1g or --ipc=host" in warnings[0]
    monkeypatch.setattr(ranks.shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(2**30))
    assert warn_of_shared_memory(device, layouts, 1) == []
