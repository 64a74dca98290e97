"""A local cluster that Ray does not start in time."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_opd.cluster.placement import Placement
from nemo_opd.cluster.ray import ray_session
from nemo_opd.cluster.ray.ray_cluster import RayCluster
from nemo_opd.cluster.ray.ray_session import STARTS
from nemo_opd.cluster.ray.services import has_ended
from nemo_opd.config.cluster import Cluster
from nemo_opd.errors import ClusterError

pytestmark = pytest.mark.world

PLACEMENT = Placement.colocated(num_nodes=1, ranks_per_node=1, num_teachers=0)


class SlowRay:
    """A replacement of `ray.init` that starts a process, which starts another one, and mostly fails."""

    def __init__(self, failures: int, folder: Path) -> None:
        self.failures = failures
        self.raylet = shutil.copy("/bin/bash", folder / "raylet")
        self.folders: list[Path] = []
        self.processes: list[psutil.Process] = []

    def __call__(self, *, _temp_dir: str, **_: Any) -> None:
        self.folders.append(Path(_temp_dir).parent)
        command = ["raylet", "-c", "sleep 600 & echo; wait", f"--temp-dir={_temp_dir}/session"]
        raylet = subprocess.Popen(command, executable=self.raylet, stdout=subprocess.PIPE)
        assert raylet.stdout is not None
        raylet.stdout.readline()
        parent = psutil.Process(raylet.pid)
        self.processes += [parent, *parent.children()]
        if len(self.folders) <= self.failures:
            raise Exception("The current node timed out during startup.")

    @property
    def alive(self) -> list[psutil.Process]:
        return [process for process in self.processes if not has_ended(process)]


def start(ray: SlowRay, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    monkeypatch.setattr(ray_session.ray, "init", ray)
    monkeypatch.setattr(RayCluster, "_reserve", lambda _: None)
    return RayCluster(Cluster(), device="cpu", placement=PLACEMENT)


def test_it_is_tried_again_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SlowRay(STARTS - 1, tmp_path)
    with start(ray, monkeypatch) as cluster:
        cluster.services.require_alive()
        assert [folder.exists() for folder in ray.folders] == [False] * (STARTS - 1) + [True]
        assert ray.alive == ray.processes[-2:]
    assert ray.alive == []
    assert not any(folder.exists() for folder in ray.folders)


def test_the_last_try_is_one_error_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SlowRay(STARTS, tmp_path)
    with pytest.raises(
        ClusterError, match=rf"^Ray did not start .* in {STARTS} attempts \(.* timed out .*\); free pro"
    ):
        start(ray, monkeypatch)
    assert len(ray.processes) == 2 * STARTS
    assert ray.alive == []
    assert not any(folder.exists() for folder in ray.folders)
