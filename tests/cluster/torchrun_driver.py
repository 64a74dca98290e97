"""The driver of test_local's cases, on every rank."""

import sys
from pathlib import Path

from nemo_opd.cli.command import fail
from nemo_opd.cluster.local import LocalCluster, driving
from nemo_opd.cluster.placement import Placement
from nemo_opd.config.cluster import Cluster
from nemo_opd.training.interrupt import Interrupt
from tests.cluster.toy import Toy

TWO = Placement.colocated(num_nodes=1, ranks_per_node=2, num_teachers=0)
SETTINGS = Cluster(launcher="local", cpu_ranks=2, timeout_s=60)


def call(method: str, arguments: list[tuple[object, ...]]) -> list[object]:
    with (
        LocalCluster(SETTINGS, device="cpu", placement=TWO) as cluster,
        cluster.group("toys", Toy, {}, TWO.student) as group,
    ):
        return group.call(method, arguments)


def until_interrupted(folder: Path, interrupt: Interrupt) -> None:
    with (
        LocalCluster(SETTINGS, device="cpu", placement=TWO) as cluster,
        cluster.group("toys", Toy, {}, TWO.student) as group,
    ):
        while not interrupt.requested:
            group.call("sum_of_ranks", [(10,), (20,)])
            (folder / "ready").touch()
    print("ended after a whole call")


def run(case: str, folder: Path) -> None:
    if case == "sums":
        for _ in range(2):
            with driving(SETTINGS) as is_driver:
                if is_driver:
                    print(call("sum_of_ranks", [(10,), (20,)]), flush=True)
        with driving(SETTINGS):
            pass
        return
    # As in a session: when another rank dies, torchrun sends SIGTERM to the driver, which must still report the death.
    with Interrupt(lambda answer: None) as interrupt, driving(SETTINGS) as is_driver:
        if is_driver:
            match case:
                case "rank 0 fails" | "rank 1 fails":
                    call("fail_in_a_collective", [(int(case.split()[1]),)] * 2)
                case "other dies":
                    call("die_in_a_collective", [(1,)] * 2)
                case _:
                    until_interrupted(folder, interrupt)


def main(case: str, folder: Path) -> None:
    try:
        run(case, folder)
    except Exception as error:
        fail(str(error), 1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
