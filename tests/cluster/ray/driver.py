"""The driver of test_signals: a rank on Ray that loads or works until a signal ends it."""

import sys
from pathlib import Path

from nemo_opd.cli.command import fail
from nemo_opd.cluster.placement import Placement
from nemo_opd.cluster.ray.ray_cluster import RayCluster, RayGroup
from nemo_opd.config.cluster import Cluster
from nemo_opd.errors import OPDError
from nemo_opd.training.interrupt import Interrupt, interruptible
from tests.cluster.toy import Toy

ONE = Placement.colocated(num_nodes=1, ranks_per_node=1, num_teachers=0)
READY = "ready"


class Loading(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.wait_for(Path("/none"))


def run(case: str, folder: Path) -> None:
    worker = Loading if case == "loads" else Toy
    with (
        RayCluster(Cluster(timeout_s=300), device="cpu", placement=ONE) as cluster,
        RayGroup(cluster, "toys", worker, {}, ONE.student) as group,
    ):
        cluster.gather([group.ready])
        with Interrupt(print):
            (folder / READY).touch()
            group.call("wait_for", [(Path("/none"),)])


if __name__ == "__main__":
    folder = Path(sys.argv[2].removeprefix("run.output_dir="))
    folder.mkdir()
    with interruptible():
        try:
            run(sys.argv[1], folder)
        except KeyboardInterrupt:
            fail("interrupted", 130)
        except OPDError as error:
            fail(str(error), 1)
