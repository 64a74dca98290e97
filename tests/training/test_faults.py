"""Whatever breaks, in whatever phase: one clear message in bounded time, nothing left, and a run that can go on.

Most faults are of one pair of workers in one Ray session, as processes take seconds to start; only what concerns the
whole run has runs of its own, of which each continues the one before.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nemo_opd.cluster.placement import Placement
from nemo_opd.cluster.virtual_cluster import VirtualCluster
from nemo_opd.cluster.worker_group import WorkerGroup
from nemo_opd.config.cluster import Cluster
from nemo_opd.errors import ClusterError, WorkerError
from tests.training import dying_writer
from tests.training.conftest import STEPS, resumed
from tests.training.faulty_rank import Faulty
from tests.training.launch import CLEAN_S, Run, start

pytestmark = pytest.mark.slow
AT_ONCE_S = 10.0
"""Far below cluster.timeout_s, and no more than Ray needs to notice on a busy machine."""
RAY_GIVES_UP_S = 60.0
PLACEMENT = Placement.colocated(num_nodes=1, ranks_per_node=2, num_teachers=1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[VirtualCluster]:
    before = set(psutil.Process().children(recursive=True))
    with VirtualCluster(Cluster(timeout_s=300), device="cpu", placement=PLACEMENT) as cluster:
        yield cluster
        started = set(psutil.Process().children(recursive=True)) - before
    _, alive = psutil.wait_procs(started, timeout=CLEAN_S)
    assert not alive


@pytest.fixture(scope="module")
def group(cluster: VirtualCluster) -> Iterator[WorkerGroup]:
    """Two ranks on which each of the tests below calls for a fault; the last one ends them."""
    with WorkerGroup(cluster, "teacher big", Faulty, {}, PLACEMENT.teachers[0]) as group:
        group.gather([group.ready])
        yield group


@pytest.fixture
def at_once() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < AT_ONCE_S


def test_killed_while_loading(cluster: VirtualCluster) -> None:
    """Its peer waits for it to join their world."""
    with (
        pytest.raises(ClusterError, match=r"^student rank 1 died while loading its model \("),
        WorkerGroup(cluster, "student", Faulty, {"dying_rank": 1}, PLACEMENT.student) as group,
    ):
        group.gather([group.ready])
    _, alive = psutil.wait_procs(ranks(), timeout=CLEAN_S)
    assert not alive


def test_out_of_memory(group: WorkerGroup, at_once: None) -> None:
    with pytest.raises(WorkerError) as caught:
        group.call("forward", [("takes_too_much", 1)] * 2, about="step 12")
    message = str(caught.value)
    assert message.startswith(
        "teacher big rank 1 failed: ClusterError: out of main memory in reading a batch: 4294967296.00 GiB were asked "
    )
    assert "lower train.micro_batch_size or train.max_length; or use more ranks" in message
    assert message.endswith("(while reading a batch (step 12))")
    assert "\n" not in message


def test_no_shared_memory_for_the_handoff(group: WorkerGroup, at_once: None) -> None:
    """The kernel says no, whatever the buffer is made of."""
    with pytest.raises(WorkerError) as caught:
        group.call("forward", [("finds_shared_memory_full", 0)] * 2)
    message = str(caught.value)
    assert message.startswith("teacher big rank 0 failed: HandoffError: no 0.00 GiB of shared memory for a teacher's o")
    assert "lower train.global_batch_size or train.max_length" in message
    assert message.endswith("(while reading a batch)")


def test_hanging_collective(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:
    monkeypatch.setattr(group.cluster, "timeout_s", 1.0)
    with pytest.raises(ClusterError) as caught:
        group.call("train_step", [("hangs", 1)] * 2, about="step 12")
    assert str(caught.value).startswith(
        "teacher big ranks 0, 1: still training on a batch (step 12) after cluster.timeout_s=1 seconds; "
    )


def test_killed_in_a_collective(group: WorkerGroup, at_once: None) -> None:
    """Bug: the message names the rank that noticed, which gets an error of its own before Ray knows of the death."""
    with pytest.raises(ClusterError) as caught:
        group.call("train_step", [("dies", 1)] * 2)
    message = str(caught.value)
    assert message.startswith("teacher big rank 1 died while training on a batch (")
    assert message.endswith("run.resume=auto continues from the last checkpoint")
    assert "\n" not in message


def ranks() -> set[psutil.Process]:
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if "RankActor" in " ".join(process.cmdline()):
                found.add(process)
        except psutil.NoSuchProcess:
            continue
    return found


# Whole runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "run"


@pytest.fixture(scope="module")
def killed(reference: Run, folder: Path) -> Run:
    """The student dies while it writes its second checkpoint."""
    script = Path(dying_writer.__file__)
    settings = ["--config", str(reference.output_dir / "config.yaml"), *WITHOUT_EXTRAS]
    run = start(folder, settings, script=script, arguments=["20"])
    run.wait_for_step(1)
    run.processes()
    run.end()
    return run


@pytest.fixture(scope="module")
def terminated(reference: Run, killed: Run, folder: Path) -> tuple[Run, float]:
    """SIGTERM to all processes of the group, Ray's own among them; and the seconds that the run took to end."""
    run = resumed(reference, folder, *WITHOUT_EXTRAS)
    run.wait_for_step(22)  # beyond what the killed run has left in the file
    run.processes()
    os.killpg(run.process.pid, signal.SIGTERM)
    start_s = time.monotonic()
    run.end()
    return run, time.monotonic() - start_s


@pytest.fixture(scope="module")
def finished(reference: Run, terminated: tuple[Run, float], folder: Path) -> Run:
    run = resumed(reference, folder, *WITHOUT_EXTRAS)
    assert run.end() == 0, run.output
    return run


WITHOUT_EXTRAS = (
    "run.resume=auto",
    "data.num_workers=0",
    "logging.tensorboard.enabled=false",
    "logging.wandb.enabled=false",
)


def test_worker_killed_while_writing_a_checkpoint(killed: Run) -> None:
    assert killed.process.returncode == 1
    assert killed.last_line.startswith("error: student rank 0 died while writing a checkpoint (")
    assert "Traceback" not in killed.output
    assert killed.checkpoints == ["step_000010"], "the half-written one is gone"
    assert killed.leftovers() == []


def test_signal_to_all_processes_ends_the_run_soon(terminated: tuple[Run, float]) -> None:
    """Bug: waiting for Ray, which has ended with the workers, until Ray itself ends the driver after a minute.

    Whether the step under way can still be saved is a matter of who ends first.
    """
    run, seconds = terminated
    assert seconds < RAY_GIVES_UP_S, run.output
    assert "run.resume=auto" in run.last_line, run.output
    assert run.process.returncode == (0 if run.last_line.startswith("ended after step ") else 1)
    assert "Failed to connect to GCS" not in run.output
    assert run.leftovers() == []


def test_run_goes_on_as_if_nothing_had_happened(reference: Run, finished: Run) -> None:
    assert [record["step"] for record in finished.metrics] == list(range(STEPS + 1))
    for expected, actual in zip(reference.metrics, finished.metrics, strict=True):
        names = [name for name in expected if not name.startswith("perf/")]
        assert {name: actual.get(name) for name in names} == pytest.approx(
            {name: expected[name] for name in names}, rel=1e-6
        ), expected["step"]
    assert finished.leftovers() == []
