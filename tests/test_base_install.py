"""The package as `pip install nemo-opd` gives it, with the lowest versions that it allows and no extra.

Takes three minutes and installs from the package index, for PyTorch as it is here from UV_FIND_LINKS too, if that is
where it came from. `test_imports.py` has a quick test of what a base install imports.
"""

import os
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.composition import ROOT

pytestmark = [pytest.mark.world, pytest.mark.nightly]
STEPS = ["train.max_steps=2", "train.validate_every=null", "train.save_every=null", "cluster.device=cpu"]
JOBS = {
    "distil": ["data.validation.max_samples=4"],
    "distil-on-policy": [f"evaluation.sets.{name}.data.max_samples=4" for name in ("seen", "held_out")],
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the programs of an environment with the lowest allowed direct dependencies.

    PyTorch is the version that the tests run with: another build is several GB.
    """
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    folder = tmp_path_factory.mktemp("lowest")
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={version('torch')}\n")
    environment = {**os.environ, "VIRTUAL_ENV": str(folder / "venv")}
    lowest = ("--resolution", "lowest-direct", "--constraints", str(constraints), str(ROOT))
    for command in (["venv", "--python", "3.11", str(folder / "venv")], ["pip", "install", *lowest]):
        subprocess.run([uv, *command], env=environment, check=True, cwd=folder)
    return folder / "venv" / "bin"


def test_the_lowest_allowed_versions_have_no_known_holes(tmp_path: Path) -> None:
    """Bug: a floor in pyproject.toml below the version with a fix, such as one of Jinja's sandbox.

    Reads PyPI's database of vulnerabilities, and fails without it.
    """
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    lowest = tmp_path / "lowest.txt"
    resolve = ("pip", "compile", "--quiet", "--resolution", "lowest-direct", "--all-extras", "--python-version", "3.11")
    subprocess.run([uv, *resolve, str(ROOT / "pyproject.toml"), "--output-file", str(lowest)], check=True)
    audit = ("tool", "run", "pip-audit", "--strict", "--disable-pip", "--no-deps", "--requirement", str(lowest))
    audited = subprocess.run([uv, *audit], capture_output=True, text=True)
    assert audited.returncode == 0, audited.stdout + audited.stderr


@pytest.mark.parametrize("verb", JOBS)
def test_the_lowest_allowed_versions_run_the_demos(programs: Path, tmp_path: Path, verb: str) -> None:
    """Bugs: a library of an extra that every run imports, a floor in pyproject.toml below what the code needs."""
    command = [str(programs / "nemo-opd"), verb, *STEPS, *JOBS[verb], f"run.output_dir={tmp_path / 'run'}"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "run" / "report" / "report.html").is_file()
