"""Shared by all tests: one thread, no haste, caches in a temporary folder, GPU tests only where there is a GPU."""

# ruff: noqa: E402, what comes first is for the imports
from tests import bytecode

bytecode.share()

import os

# Threads that wait for others would spin, which takes the cores from those: of a tiny model, nine tenths of the time.
# OpenMP reads it when torch is imported, in this process and in all that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

import nemo_opd.cluster.ray  # noqa: F401, sets what Ray reads when it is imported, as some tests do themselves
from tests import costs
from tests.tiny import Tiny, make_tiny

torch.set_num_threads(1)
# A busy machine is slow, which says nothing about the code.
settings.register_profile("unhurried", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
# Of clusters that tests start themselves: their workers would give way to all others and hardly get anything done.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112, the name that Ray reads
SLOWEST = ("training", "workers", "models", "cluster", "rollout")
"""Folders of tests; with these first, processes that share out the files are done at about the same time."""
ON_THE_REFERENCE = ("test_run.py", "test_resume.py")
"""Files of tests that look at one run, which takes a minute; one process has them all."""


class ByFile(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "reference" if Path(file).name in ON_THE_REFERENCE else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in SLOWEST)
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


def pytest_runtest_teardown() -> None:
    costs.unit_test = None


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    os.environ |= {"NEMO_OPD_CACHE": str(folder), "HF_DATASETS_CACHE": str(folder / "datasets")}
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))
