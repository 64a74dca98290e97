"""Every mutant of the list still fits the code."""

import shutil
from pathlib import Path

import pytest

from tests.mutants.listed import ROOT, Mutant, listed


@pytest.mark.parametrize("mutant", listed(), ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_made(mutant: Mutant, tmp_path: Path) -> None:
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / mutant.file, copy)

    mutant.apply(tmp_path)

    compile(copy.read_text(encoding="utf-8"), mutant.file, "exec")
    assert all((ROOT / test).exists() for test in mutant.tests)
