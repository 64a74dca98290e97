"""What a machine's GPUs do not allow is said before anything starts."""

from pathlib import Path

import pytest

from nemo_opd.cluster.placement import Placement
from nemo_opd.config.cluster import Cluster
from nemo_opd.errors import ConfigError
from nemo_opd.training.launch import require_shared_gpus

pytestmark = pytest.mark.world

TWO_ON_EACH = Placement.colocated(num_nodes=1, ranks_per_node=2, num_teachers=1)
APART = Placement.separate(num_nodes=1, student_per_node=1, teachers_per_node=[1])


@pytest.fixture
def exclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a driver's tool first that knows two GPUs, of which the second takes one process."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n[ $1 = --query-gpu=index,compute_mode ] && echo 0, Default && echo 1, Exclusive_Process\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.usefixtures("exclusive")
def test_a_gpu_that_takes_one_process_is_refused_to_two() -> None:
    with pytest.raises(ConfigError) as caught:
        require_shared_gpus(Cluster(), "cuda", TWO_ON_EACH)
    told = str(caught.value)
    assert told.startswith("cluster.placement=colocated: GPU 1 is in the compute mode Exclusive_Process")
    assert "the run has 2 on each; set the mode with `nvidia-smi -i 1 -c DEFAULT`" in told


@pytest.mark.usefixtures("exclusive")
def test_one_process_on_each_may_have_it() -> None:
    require_shared_gpus(Cluster(), "cuda", APART)
    require_shared_gpus(Cluster(launcher="local"), "cuda", TWO_ON_EACH)
    require_shared_gpus(Cluster(), "cpu", TWO_ON_EACH)


def test_without_the_drivers_tool_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    require_shared_gpus(Cluster(), "cuda", TWO_ON_EACH)
