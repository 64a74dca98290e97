"""Shared by all tests: one thread, no haste, caches in a temporary folder, GPU tests only where there is a GPU.

PyTorch and transformers are imported late: the process that shares out the tests needs neither.
"""

# ruff: noqa: E402, what comes first is for the imports
from tests import bytecode

bytecode.share()

import gc
import os
import signal

# In the background of a shell it is ignored, also by what tests start, which would wait in vain to be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Threads that wait for others would spin, which takes the cores from those: of a tiny model, nine tenths of the time.
# Sums are the same to the last bit in every layout only with equally many. OpenMP reads both when torch is imported, in
# this process and in all that tests start.
os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}

# Help and tables are as wide as where there is no terminal.
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

# A busy machine is slow, which says nothing about the code.
settings.register_profile("unhurried", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
# Of clusters that tests start themselves: their workers would give way to all others and hardly get anything done.
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
"""Files that share what takes long to make, bytecode of vLLM included; one process has them all."""
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
"""Files by the time they take, the longest first: processes that share them out are done at about the same time."""
_GROUPS = {file: group for group, files in TOGETHER.items() for file in files}
_PLACES = {file: place for place, file in enumerate([file for name in LONGEST for file in TOGETHER.get(name, (name,))])}


class ByFile(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return _GROUPS.get(file.removeprefix("tests/"), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile | None:
    """Return the scheduler of the settings, `--dist loadfile`; xdist has those of other modes."""
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Pause the garbage collector while files are imported; afterwards it scans the objects of tests alone."""
    if session.config.getoption("dist") == "no":  # as in each process that runs tests
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
    """Reports have none, which take more than half of a short run's time, but for tests that patch PLOTS back."""
    from nemo_opd.logging import report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "PLOTS", ())
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> "Tiny":
    from tests.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny"))
