"""The launcher without Ray: one process, or processes as torchrun starts them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from nemo_opd.cluster.local import LocalCluster
from nemo_opd.cluster.placement import Placement
from nemo_opd.config.cluster import Cluster
from nemo_opd.errors import WorkerError
from tests.cluster.toy import Toy
from tests.waiting import wait_until

pytestmark = pytest.mark.world

DRIVER = Path(__file__).with_name("torchrun_driver.py")
ALONE = Placement.colocated(num_nodes=1, ranks_per_node=1, num_teachers=1)


def cluster() -> LocalCluster:
    return LocalCluster(Cluster(timeout_s=60), device="cpu", placement=ALONE)


def test_groups_share_one_world_which_is_left_at_the_end() -> None:
    """Twice, as in a notebook. Bug: a process group that stays, so that a second run fails."""
    for offset in (10, 20):
        with (
            cluster() as here,
            here.group("a", Toy, {}, ALONE.student) as a,
            here.group("b", Toy, {}, ALONE.student) as b,
        ):
            assert [group.call("sum_of_ranks", [(offset,)]) for group in (a, b)] == [[(0, float(offset))]] * 2
            assert here.worker("a") is not here.worker("b")
        assert not dist.is_initialized()


def test_an_error_keeps_its_frames_and_the_worker_is_closed() -> None:
    """Bug: a debugger that finds the text of a traceback alone."""
    with cluster() as here, here.group("toys", Toy, {}, ALONE.student) as group:
        toy = here.worker("toys")
        with pytest.raises(
            WorkerError, match=r"^toys rank 0 failed: KeyError: 'no such thing' \(while in 'f"
        ) as caught:
            group.call("fail_in_a_collective", [(0,)])
    assert isinstance(caught.value.__cause__, KeyError)
    assert toy.is_closed
    assert not dist.is_initialized()


def torchrun(case: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [*command, str(DRIVER), case, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )


def test_two_worlds_and_a_run_without_one(tmp_path: Path) -> None:
    """As two runs of a sweep, and a dry run. Bugs: the second finds the first's rendezvous; a rank waits for ever."""
    run = torchrun("sums", tmp_path)
    out, error = run.communicate(timeout=120)
    assert run.returncode == 0, error
    assert out.splitlines() == ["[(0, 31.0), (1, 31.0)]", "[(0, 31.0), (1, 31.0)]"]


FAILURES = {
    "driver fails": "error: toys rank 0 failed: KeyError: 'no such thing' (while in 'fail_in_a_collective')",
    "other fails": "error: toys rank 1 failed: KeyError: 'no such thing' (while in 'fail_in_a_collective')",
    "other dies": "error: toys: the process of another rank died while in 'die_in_a_collective'; torchrun says below",
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_is_one_line_and_ends_all(tmp_path: Path, case: str) -> None:
    run = torchrun(case, tmp_path)
    out, error = run.communicate(timeout=120)
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert line.startswith(FAILURES[case])
    assert run.returncode == 1
    assert out == ""
    assert ranks(tmp_path) == []


def test_rank_zero_alone_answers_a_signal(tmp_path: Path) -> None:
    """Bug: another rank ends at the signal, and the step that rank 0 finishes hangs."""
    run = torchrun("until interrupted", tmp_path)
    wait_until((tmp_path / "ready").exists, "the first call")
    for process in ranks(tmp_path):
        process.send_signal(signal.SIGINT)
    out, error = run.communicate(timeout=120)
    assert run.returncode == 0, error
    assert out.splitlines() == ["ended after a whole call"]


def ranks(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if str(folder) in command and "torch.distributed.run" not in command:
            found.append(process)
    return found
