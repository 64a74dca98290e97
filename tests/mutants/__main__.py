"""Make each mistake of mutants.toml in a copy of the repository and run its tests: `python -m tests.mutants [WORD …]`.

Words select the mutants whose names contain one of them. Exits with 1 if a mutant survives.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.listed import ROOT, Mutant, listed

WORKERS = 2
"""Mutants that are tested in parallel."""


def tests_fail(tree: Path, tests: tuple[str, ...]) -> bool:
    """Run tests in a copy. Raises RuntimeError with the output if they could not run."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # 1: tests failed; 2: they could not be collected, for example because an import fails.
    if run.returncode not in (0, 1):
        raise RuntimeError(f"pytest {' '.join(tests)} ended with {run.returncode}:\n{run.stdout}")
    return run.returncode == 1


def copied(folder: Path) -> Path:
    """Copy the tracked files with their uncommitted changes."""
    tree = folder / "tree"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def is_killed(mutant: Mutant) -> bool:
    with tempfile.TemporaryDirectory(prefix="mutant_") as folder:
        tree = copied(Path(folder))
        mutant.apply(tree)
        killed = tests_fail(tree, mutant.tests)
        print("killed  " if killed else "SURVIVES", mutant.name, flush=True)
        return killed


def main(words: list[str]) -> int:
    mutants = [mutant for mutant in listed() if not words or re.search("|".join(words), mutant.name)]
    if not mutants:
        print(f"no mutant's name has {' or '.join(words)}")
        return 2
    with tempfile.TemporaryDirectory(prefix="mutant_") as folder:
        # A test that fails anyway would kill every mutant.
        if tests_fail(copied(Path(folder)), tuple(sorted({test for mutant in mutants for test in mutant.tests}))):
            print("the tests fail without a mutant")
            return 2
    with ThreadPoolExecutor(WORKERS) as pool:
        killed = sum(pool.map(is_killed, mutants))
    print(f"{killed} of {len(mutants)} killed")
    return int(killed < len(mutants))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
