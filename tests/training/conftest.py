"""Runs and Ray nodes that several tests share, since starting Ray takes seconds."""

from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests import processes
from tests.tiny import Tiny
from tests.training.launch import SCRIPT, Run, start
from tests.waiting import CLEAN_S

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster as Nodes

STEPS = 18
SAVE_EVERY = 6
VALIDATE_EVERY = 9
STUDENT_TIMES = [f"perf/{name}_s" for name in ("handoff", "student_forward", "loss", "student_backward", "optimizer")]


@pytest.fixture(scope="session")
def reference(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that ends well, with every logger and feature switched on."""
    run = start(
        tmp_path_factory.mktemp("runs") / "reference",
        tiny.overrides(
            f"train.max_steps={STEPS}",
            f"train.save_every={SAVE_EVERY}",
            f"train.validate_every={VALIDATE_EVERY}",
            "train.keep_last=2",
            "loss.scaling=dynamic",
            "data.num_workers=1",
            "logging.tensorboard.enabled=true",
            "logging.wandb.enabled=true",
            "logging.wandb.mode=offline",
        ),
    )
    run.wait_for_step(1)
    run.processes()
    assert run.end() == 0, run.output
    return run


CPUS = 4
"""CPUs of each node."""
HEAD = {"num_cpus": CPUS, "include_dashboard": False, "_system_config": {"prestart_worker_first_driver": False}}


@pytest.fixture(scope="module")
def nodes() -> "Iterator[Nodes]":
    from ray.cluster_utils import Cluster as Nodes

    processes.context()
    forkserver.ensure_running()  # it outlives the nodes
    children = set(psutil.Process().children(recursive=True))
    nodes = Nodes(initialize_head=True, head_node_args=HEAD)
    nodes.add_node(num_cpus=CPUS)
    yield nodes
    started = set(psutil.Process().children(recursive=True)) - children
    nodes.shutdown()
    _, alive = psutil.wait_procs(started, timeout=CLEAN_S)
    assert not alive


FAULTY = Path(__file__).with_name("faulty_workers.py")


def resumed(
    reference: Run, output_dir: Path, *overrides: str, script: Path = SCRIPT, arguments: Sequence[str] = ()
) -> Run:
    """Start a run from the reference's config.yaml, without trackers; `script` may be one with faulty workers."""
    settings = ["run.resume=auto", "logging.tensorboard.enabled=false", "logging.wandb.enabled=false", *overrides]
    return start(
        output_dir,
        ["--config", str(reference.output_dir / "config.yaml"), *settings],
        script=script,
        arguments=arguments,
    )
