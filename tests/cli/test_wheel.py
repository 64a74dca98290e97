"""The package installed from its wheel alone, away from the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.composition import ROOT

pytestmark = pytest.mark.world
VERBS = """
import sys
from importlib.metadata import entry_points

import nemo_opd
from nemo_opd.paths import CHECKOUT

main = entry_points(group="console_scripts")["nemo-opd"].load()
assert main.__globals__["__file__"].startswith(sys.argv[1]), main.__globals__["__file__"]
assert CHECKOUT is None
assert main(["init", "mine"]) == 0
small = ["train.max_steps=2", "train.global_batch_size=2", "train.micro_batch_size=2", "train.max_length=32"]
small += ["data.validation.arrow_files=null", "data.validation.max_samples=null", "cluster.launcher=local"]
small += ["data.packing=false"]  # of thousands of texts, which would all be read first
assert main(["distil", "--config", "mine/distil.yaml", *small, "run.output_dir=run"]) == 0
assert main(["generate", "--model", "run/final", "--prompt", "Once", "--max-new-tokens", "2"]) == 0
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_has_configurations_and_no_caches(site: Path) -> None:
    names = {str(file.relative_to(site / "nemo_opd")) for file in (site / "nemo_opd").rglob("*") if file.is_file()}
    recipes = {str(file.relative_to(ROOT)) for file in (ROOT / "configs").rglob("*") if file.is_file()}
    assert recipes <= names
    assert "py.typed" in names
    assert not [name for name in names if name.endswith((".pyc", ".nbi", ".nbc"))]


def test_verbs_work_from_the_wheel_alone(site: Path, tmp_path: Path) -> None:
    """Bug: a recipe, a template or a verb's code is in the checkout and not in the wheel."""
    # For so few tokens, interpreting numba's functions is faster than compiling them.
    environment = {**os.environ, "PYTHONPATH": str(site), "NUMBA_DISABLE_JIT": "1"}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", VERBS, str(site)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "run" / "report" / "report.html").is_file()
    assert {file.name for file in (tmp_path / "mine").iterdir()} == {"distil.yaml", "run.schema.json"}
