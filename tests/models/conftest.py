"""One start of two ranks does the work of all tests here that need two, since starting is what takes time."""

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
class OfRank:
    memory: dict[str, test_sharded_load.Memory]
    gathered: tuple[Tensor, Tensor]
    learned: tuple[Tensor, Tensor]
    errors: dict[str, dict[str, float]]


def on_rank(work: Work) -> OfRank:
    # What is freed later may stay in a pool, where memory that is used again cannot be seen.
    memory = {name: test_sharded_load.memory_on_rank(folder) for name, folder in work.large.items()}
    gathered, learned = test_context_parallel.gathered_on_rank(), test_context_parallel.learned_on_rank()
    return OfRank(memory, gathered, learned, test_parallel.errors_on_rank(work.families, work.output))


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[OfRank]:
    folder = tmp_path_factory.mktemp("two_ranks")
    families = {family: save(family, folder) for family in test_parallel.OF_FAMILY}
    large = test_sharded_load.save_large(folder / "large")
    return on_ranks(2, on_rank, Work(large, families, folder / "output"), folder / "ranks")
