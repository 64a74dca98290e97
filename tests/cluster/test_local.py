"""The launcher without Ray: one process, or processes as torchrun starts them."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock, patch

import psutil
import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from nemo_opd.cluster.local import LocalCluster
from nemo_opd.cluster.placement import Placement
from nemo_opd.config.cluster import Cluster
from nemo_opd.distributed.process_group import join, serve_store, share_key
from nemo_opd.errors import ClusterError, WorkerError
from tests import processes
from tests.cluster.toy import Toy
from tests.waiting import wait_until
from tests.workers.local import as_torchrun_starts

pytestmark = pytest.mark.world

DRIVER = Path(__file__).with_name("torchrun_driver.py")
ALONE = Placement.colocated(num_nodes=1, ranks_per_node=1, num_teachers=1)


def cluster() -> LocalCluster:
    return LocalCluster(Cluster(timeout_s=60), device="cpu", placement=ALONE)


def test_groups_share_one_world_which_is_left_at_the_end() -> None:
    """Bug: a process group stays after a run, so a second run in a notebook fails."""
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
    """Bug: a debugger gets only the text of a traceback."""
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


def test_a_rank_that_dies_is_one_line_and_ends_all(tmp_path: Path) -> None:
    run = torchrun("other dies", tmp_path)
    out, error = run.communicate(timeout=120)
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert line.startswith(
        "error: toys: the process of another rank died while in 'die_in_a_collective'; torchrun reports below"
    )
    assert run.returncode == 1
    assert out == ""
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path) in command]


class Ranks:
    """The driver and another rank, forked as torchrun would start them; each writes its output to files."""

    def __init__(self, case: str, folder: Path) -> None:
        self.folder = folder
        self.store = serve_store("127.0.0.1", 60)
        self.processes = [processes.make(_rank, rank, self.store.port, case, folder) for rank in range(2)]
        for process in self.processes:
            process.start()

    def end(self) -> list[int | None]:
        """Return all exit statuses, with None for a process that did not end in time."""
        for process in self.processes:
            process.join(120)
        statuses = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
        return statuses

    def output(self, rank: int, stream: str) -> list[str]:
        return (self.folder / f"{stream}_{rank}").read_text().splitlines()


def _rank(rank: int, port: int, case: str, folder: Path) -> None:
    from tests.cluster import torchrun_driver

    as_torchrun_starts(rank, 2, port)
    for stream, descriptor in (("out", 1), ("error", 2)):
        os.dup2(os.open(folder / f"{stream}_{rank}", os.O_CREAT | os.O_WRONLY), descriptor)
    torchrun_driver.main(case, folder)


def test_two_worlds_and_a_run_without_one(tmp_path: Path) -> None:
    """Bugs: the second run of a sweep finds the first one's rendezvous; a rank waits for a dry run without end."""
    ranks = Ranks("sums", tmp_path)
    assert ranks.end() == [0, 0], ranks.output(0, "error")
    assert ranks.output(0, "out") == ["[(0, 31.0), (1, 31.0)]"] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_one_line_and_ends_all(tmp_path: Path, failing: int) -> None:
    ranks = Ranks(f"rank {failing} fails", tmp_path)
    assert ranks.end() == [1, 1]
    lines = [line for rank in range(2) for line in ranks.output(rank, "error") if line.startswith("error: ")]
    assert lines == [f"error: toys rank {failing} failed: KeyError: 'no such thing' (while in 'fail_in_a_collective')"]
    assert ranks.output(0, "out") == []


def test_rank_zero_alone_answers_a_signal(tmp_path: Path) -> None:
    """Bug: another rank ends at the signal, and the step that rank 0 finishes hangs."""
    ranks = Ranks("until interrupted", tmp_path)
    wait_until((tmp_path / "ready").exists, "the first call")
    for process in ranks.processes:
        os.kill(process.pid, signal.SIGINT)
    assert ranks.end() == [0, 0], ranks.output(0, "error")
    assert ranks.output(0, "out") == ["ended after a whole call"]


class Planted:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


def _stranger(port: int, folder: Path) -> None:
    """Join as rank 1 without the key, which other users cannot read, and answer a call."""
    as_torchrun_starts(1, 2, port)
    store = next(iter(dist.rendezvous("env://")))[0]
    dist.PrefixStore("opd/key", store).set("read_by_1", "")
    join(dist.PrefixStore("opd/0", store), 1, 2, "cpu", 60)
    group = dist.new_group(backend="gloo")
    with patch.object(distributed_c10d, "_unpickler", MagicMock()):
        dist.scatter_object_list([None], None, group=group)
    dist.gather_object(Planted(folder / "planted"), None, group=group)


def test_nothing_of_a_stranger_is_unpickled(tmp_path: Path) -> None:
    """Bug: another user connects to torchrun's store as a rank, and rank 0 runs code from its pickle."""
    store = serve_store("127.0.0.1", 60)
    ours = processes.make(_rank, 0, store.port, "sums", tmp_path)
    stranger = processes.make(_stranger, store.port, tmp_path)
    ours.start()
    stranger.start()
    ours.join(60)
    stranger.kill()
    assert not (tmp_path / "planted").exists()
    assert "a rank received an object without the signature of this run" in (tmp_path / "error_0").read_text()
    assert ours.exitcode == 1


def test_the_folder_of_the_key_is_ours(tmp_path: Path) -> None:
    """Bug: another user chooses the key by naming their own folder."""
    store = dist.HashStore()
    tmp_path.chmod(0o755)
    store.set("folder", str(tmp_path))
    with pytest.raises(ClusterError, match="others may have written it"):
        share_key(store, 1, 2)


def test_a_key_folder_that_becomes_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: another user swaps the folder between its check and the read, and so knows the run's key."""
    private, foreign = tmp_path / "private", tmp_path / "foreign"
    for folder in (private, foreign):
        folder.mkdir(mode=0o700)
        (folder / "nemo_opd_key").write_bytes(folder.name.encode())
    check = os.fstat

    def swap_after_the_check(handle: int) -> os.stat_result:
        status = check(handle)
        private.rename(tmp_path / "moved")
        private.symlink_to(foreign)
        return status

    store = dist.HashStore()
    store.set("folder", str(private))
    monkeypatch.setattr(os, "fstat", swap_after_the_check)
    key = share_key(store, 1, 2)
    monkeypatch.undo()
    assert key == b"private"
