"""Starts two ranks once, for all tests here that need two: the start takes most of the time."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from tests.models import test_context_parallel, test_parallel, test_sharded_load
from tests.models.families import save
from tests.models.world import on_ranks


@dataclass(frozen=True)
class Work:
    large: dict[str, Path]
    families: dict[str, Path]
    output: Path


@dataclass(frozen=True)
class RankResults:
    memory: dict[str, test_sharded_load.Memory]
    gathered: tuple[Tensor, Tensor]
    learned: tuple[Tensor, Tensor]
    errors: dict[str, dict[str, float]]


def on_rank(work: Work) -> RankResults:
    # First: memory that other work has freed may stay in a pool, and its reuse cannot be measured.
    memory = {name: test_sharded_load.memory_on_rank(folder) for name, folder in work.large.items()}
    gathered, learned = test_context_parallel.gathered_on_rank(), test_context_parallel.learned_on_rank()
    return RankResults(memory, gathered, learned, test_parallel.errors_on_rank(work.families, work.output))


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[RankResults]:
    folder = tmp_path_factory.mktemp("two_ranks")
    families = {family: save(family, folder) for family in test_parallel.FAMILY_LAYOUTS}
    large = test_sharded_load.save_large(folder / "large")
    return on_ranks(2, on_rank, Work(large, families, folder / "output"), folder / "ranks")
