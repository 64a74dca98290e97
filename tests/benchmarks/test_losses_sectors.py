"""Memory sectors read by gathers of pairs."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest
import torch

from nemo_opd.kernels.forms import EntryLists
from tests.losses.real_sizes import projection


@pytest.fixture
def sectors() -> Iterator[ModuleType]:
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    with patch.object(sys, "path", [str(folder), *sys.path]):
        yield importlib.import_module("losses_sectors")
        sys.modules.pop("losses_sectors", None)


def test_a_program_reads_a_sector_once(sectors: ModuleType) -> None:
    program = np.array([0, 0, 0])
    assert sectors.moved_bytes(np.array([0, 7, 3]), program) == 32
    assert sectors.moved_bytes(np.array([0, 8, 16]), program) == 96
    assert sectors.moved_bytes(np.array([5, 4, 5]), np.array([0, 1, 1])) == 64


def test_lists_are_read_tile_by_tile(sectors: ModuleType) -> None:
    """Two short lists share a tile, and their third entries need a second round; eight long lists share a tile, too."""
    short, long = [0, 1, 8], list(range(64))
    entries = [*short, *short, *long, *long]
    begins = np.cumsum([0, 3, 3, 64, 64])
    lists = EntryLists(torch.from_numpy(begins), torch.tensor(entries), torch.ones(len(entries)), 2)
    assert sectors.of_lists(lists) == 32 * (1 + 1 + 8)


def test_the_order_by_student_moves_a_third(sectors: ModuleType) -> None:
    name, *numbers = sectors.row("a pair", projection(12_825, 20_001)).strip("| ").split(" | ")
    assert name == "a pair"
    by_id, by_student = map(float, numbers[2:4])
    assert by_student < by_id / 3
