"""Version and commit of a run, also from a copy of the checkout that is not installed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_opd import paths
from tests.composition import ROOT

SCRIPT = """
from importlib.metadata import distributions
assert not any(found.name == "nemo-opd" for found in distributions()), "installed"
from nemo_opd.paths import commit, package_version
print(package_version(), commit())
"""


@pytest.mark.world
def test_a_copy_on_the_path_that_is_not_installed_has_a_version(tmp_path: Path) -> None:
    """Bugs: PackageNotFoundError at the end of each run; a benchmark fails in `git describe` after measuring."""
    package = tmp_path / "nemo_opd"
    package.mkdir()
    for name in ("__init__.py", "paths.py", "errors.py"):
        shutil.copy(ROOT / "nemo_opd" / name, package)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    # -S: the package is in this environment's site-packages.
    ran = subprocess.run(
        [sys.executable, "-S", "-c", SCRIPT],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )

    assert ran.stdout.split() == ["0.1.0", paths.UNKNOWN], ran.stderr


def test_the_commit_is_named_from_outside_where_there_is_no_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_OPD_COMMIT", "abc1234")
    assert paths.commit() == "abc1234"
