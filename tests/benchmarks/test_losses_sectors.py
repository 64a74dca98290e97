"""Sectors that gathers of pairs read."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest

from tests.losses.real_sizes import projection


@pytest.fixture
def sectors() -> Iterator[ModuleType]:
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    with patch.object(sys, "path", [str(folder), *sys.path]):
        yield importlib.import_module("losses_sectors")
        sys.modules.pop("losses_sectors", None)


def test_a_sector_counts_once_for_some_of_the_students_columns(sectors: ModuleType) -> None:
    assert sectors.moved_bytes(np.array([0, 7, 3, -1])) == 32
    assert sectors.moved_bytes(np.array([0, 8, -1, 16])) == 96
    far = np.full(2000, -1)
    far[[0, 1999]] = 5, 4  # in two programs' blocks
    assert sectors.moved_bytes(far) == 64


def test_the_order_by_student_moves_a_third(sectors: ModuleType) -> None:
    name, *numbers = sectors.row("a pair", projection(12_825, 20_001)).strip("| ").split(" | ")
    assert name == "a pair"
    by_id, by_student = map(float, numbers[2:])
    assert by_student < by_id / 3
