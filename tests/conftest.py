"""Settings of all tests: one thread, no deadlines, caches in a temporary folder, GPU tests skipped without a GPU.

PyTorch and transformers are imported late: xdist's controller, which distributes the tests, does not need them.
"""

# ruff: noqa: E402, the imports depend on the statements before them
from tests import bytecode

bytecode.share()

import gc
import os
import signal

# A shell's background jobs ignore SIGINT, and so would processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# PASSIVE: waiting threads would spin and take the cores from working ones, which costs a tiny model 90 % of its time.
# One thread: sums are bitwise equal in every layout only with equal thread counts. OpenMP reads both variables when
# torch is imported, in this process and in those that tests start.
os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}

# Help and tables get the width that they have without a terminal.
os.environ.pop("COLUMNS", None)

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

import nemo_opd.cluster.ray  # noqa: F401, sets what Ray reads when it is imported, as some tests do themselves
from tests import costs

if TYPE_CHECKING:
    from tests.tiny import Tiny

# A slow example on a busy machine is not a bug.
settings.register_profile("unhurried", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
# Workers of clusters that tests start would yield to every other process and hardly make progress.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112, the name that Ray reads
TOGETHER = {
    "the reference run": ("training/test_run.py", "training/test_resume.py"),
    "ranks on Ray": tuple(f"cluster/ray/shared/test_{name}.py" for name in ("privacy", "cluster", "faults")),
    "two ranks of models": (
        "models/test_context_parallel.py",
        "models/test_parallel.py",
        "models/test_sharded_load.py",
    ),
    "vLLM": ("training/test_on_vllm.py", "rollout/test_server_vllm.py"),
    "real projections": (
        *(f"projection/test_{name}.py" for name in ("real_pairs", "audit", "byte_prefix", "shared_prefix")),
        "projection/test_teacher_pieces.py",
        "losses/test_real_positions.py",
    ),
}
"""Groups of files that share slow fixtures or vLLM's bytecode; one process runs a whole group."""
LONGEST = (
    "vLLM",
    "the reference run",
    "site/test_tutorials.py",
    "cluster/ray/test_signals.py",
    "training/test_across_nodes.py",
    "training/test_signals.py",
    "training/test_on_a_server.py",
    "kernels/test_interpreted.py",
    "real projections",
    "training/test_memory_measured.py",
    "two ranks of models",
    "workers/test_every_loss.py",
    "workers/test_layouts.py",
    "ranks on Ray",
    "losses/test_fused.py",
    "workers/test_compile.py",
    "training/test_on_policy.py",
    "models/test_generation.py",
)
"""Files or groups, the slowest first, so that all processes finish at about the same time."""
_GROUPS = {file: group for group, files in TOGETHER.items() for file in files}
_PLACES = {file: place for place, file in enumerate([file for name in LONGEST for file in TOGETHER.get(name, (name,))])}


class ByFile(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return _GROUPS.get(file.removeprefix("tests/"), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile | None:
    """Return the scheduler for `--dist loadfile`, our default; None leaves other modes to xdist."""
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Pause the garbage collector during imports, and exclude the imported objects from later collections."""
    if session.config.getoption("dist") == "no":  # also the value in xdist's workers
        import torch

        torch.set_num_threads(1)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    items.sort(key=lambda item: _PLACES.get(item.path.relative_to(Path(__file__).parent).as_posix(), len(_PLACES)))
    for item in items:
        if not costs.MARKERS & {marker.name for marker in item.iter_markers()}:
            item.add_marker("unit")
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    costs.unit_test = item.nodeid if item.get_closest_marker("unit") else None


def pytest_runtest_teardown(item: pytest.Item) -> None:
    costs.unit_test = None
    costs.check_threads(item.nodeid)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    os.environ |= {"NEMO_OPD_CACHE": str(folder), "HF_DATASETS_CACHE": str(folder / "datasets")}
    return folder


@pytest.fixture(scope="module", autouse=True)
def _without_charts() -> Iterator[None]:
    """Leave charts out of reports: they take more than half of a short run's time. Some tests patch PLOTS back."""
    from nemo_opd.logging import report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "PLOTS", ())
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> "Tiny":
    from tests.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny"))
