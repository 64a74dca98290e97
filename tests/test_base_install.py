"""Installs of `nemo-opd`, and of `nemo-opd[train]` with the lowest allowed versions.

Takes three minutes and installs from the package index, and PyTorch from UV_FIND_LINKS if the index lacks this build.
`test_imports.py` has quick tests of the imports of each install.
"""

import os
import shutil
import subprocess
import sys
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
LIGHT = """
import torch
from transformers import AutoTokenizer

from nemo_opd import Callback
from nemo_opd.alignment import TokenAligner
from nemo_opd.demo import model_path
from nemo_opd.integrations import hf
from nemo_opd.integrations.distillation import Distillation
from nemo_opd.losses import p_kl
from nemo_opd.projection import build_projection

student, teacher = (AutoTokenizer.from_pretrained(model_path(name)) for name in ("student", "teacher_cross"))
ids, teacher_ids = (tokenizer("One, two, three.")["input_ids"] for tokenizer in (student, teacher))
alignment = TokenAligner(student, teacher).align(ids, teacher_ids)
projection = build_projection(student, teacher, top_k=4)
logits = torch.zeros(1, len(ids), projection.student_vocab_size, requires_grad=True)
batch = {
    "student_ids": ids,
    "teacher_ids": teacher_ids,
    "student_chunk_id": alignment.student_chunk_id,
    "teacher_chunk_id": alignment.teacher_chunk_id,
}
tensors = {name: torch.as_tensor(values)[None] for name, values in batch.items()}
teacher_logits = torch.randn(1, len(teacher_ids), projection.teacher_vocab_size)
p_kl(logits, teacher_logits, projection=projection, **tensors).loss.backward()
assert logits.grad.abs().sum() > 0

distillation = Distillation(
    {
        "student": {"model": "demo:student"},
        "teachers": [
            {"model": "demo:teacher_same", "type": "same_tokenizer"},
            {"model": "demo:teacher_cross", "type": "cross_tokenizer"},
        ],
        "loss": "gold",
        "train": {"max_length": 96},
    }
)
batch = distillation.collator([{"text": "One, two, three."}, {"text": "Four."}])
logits = torch.zeros(*batch["input_ids"].shape, distillation.vocab_size, requires_grad=True)
distillation.loss(logits, batch["batch"]).loss.backward()
assert logits.grad.abs().sum() > 0
"""


def install(folder: Path, *arguments: str) -> Path:
    """Install packages in a new environment, with arguments of `uv pip install`; return the folder of its programs.

    PyTorch is the version that the tests run with: another build is several GB.
    """
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={version('torch')}\n")
    environment = {**os.environ, "VIRTUAL_ENV": str(folder / "venv")}
    pinned = ("--constraints", str(constraints), *arguments)
    for command in (["venv", "--python", "3.11", str(folder / "venv")], ["pip", "install", *pinned]):
        subprocess.run([uv, *command], env=environment, check=True, cwd=folder)
    return folder / "venv" / "bin"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the programs of an environment with the lowest allowed direct dependencies."""
    return install(tmp_path_factory.mktemp("lowest"), "--resolution", "lowest-direct", f"{ROOT}[train]")


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the programs of an environment with the bare wheel."""
    folder = tmp_path_factory.mktemp("light")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    return install(folder, str(wheel))


def test_the_bare_wheel_aligns_projects_and_learns(light: Path, tmp_path: Path) -> None:
    """Bug: a library of the extra `train` that alignment, projection, losses or integrations import."""
    environment = {**os.environ, "NEMO_OPD_CACHE": str(tmp_path), "NUMBA_DISABLE_JIT": "1"}
    command = [light / "python", "-P", "-c", LIGHT]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("command", [["nemo-opd", "distil"], ["python", "-Pc", "import nemo_opd; nemo_opd.distil({})"]])
def test_the_bare_wheel_says_what_runs_need(light: Path, tmp_path: Path, command: list[str]) -> None:
    """Also shows that the environment of the test above lacks all of these packages."""
    ran = subprocess.run([light / command[0], *command[1:]], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr.endswith(
        "(argcomplete, datasets, hydra, matplotlib, peft, psutil, pyarrow, ray); run `pip install 'nemo-opd[train]'`\n"
    )


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
    """Bugs: a library of an extra that every run imports; a floor in pyproject.toml that is too low for the code."""
    command = [str(programs / "nemo-opd"), verb, *STEPS, *JOBS[verb], f"run.output_dir={tmp_path / 'run'}"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "run" / "report" / "report.html").is_file()
