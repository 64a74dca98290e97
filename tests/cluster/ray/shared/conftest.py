"""One Ray session with few processes, which take seconds to start, for all tests here."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from nemo_opd.cluster.placement import Placement
from nemo_opd.cluster.ray.ray_cluster import RayCluster, RayGroup
from nemo_opd.cluster.ray.ray_session import VARIABLES
from nemo_opd.config.cluster import Cluster
from tests.cluster.toy import Toy
from tests.waiting import CLEAN_S

TWO_GROUPS = Placement.colocated(num_nodes=1, ranks_per_node=2, num_teachers=1)


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a home folder without a token."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="package")
def cluster(home: Path) -> Iterator[RayCluster]:
    folders = set(Path("/tmp").glob("opd_*/owner.lock"))
    children = set(psutil.Process().children(recursive=True))
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", str(home))
            for name in VARIABLES:
                patch.delenv(name, raising=False)
            cluster = stack.enter_context(RayCluster(Cluster(timeout_s=300), device="cpu", placement=TWO_GROUPS))
        yield cluster
        assert cluster.session._folder is not None
        session_folder = cluster.session._folder.path
        assert session_folder / "owner.lock" not in folders
        started = set(psutil.Process().children(recursive=True)) - children
        assert any("raylet" in process.name() for process in started)
    assert not session_folder.exists()
    _, alive = psutil.wait_procs(started, timeout=CLEAN_S)
    assert not alive, "processes that outlive the cluster"


@pytest.fixture(scope="package")
def group(cluster: RayCluster) -> Iterator[RayGroup]:
    """Start two ranks; one of them dies in the last test of test_cluster."""
    with RayGroup(cluster, "toys", Toy, {}, TWO_GROUPS.student) as group:
        group.cluster.gather([group.ready])
        yield group
