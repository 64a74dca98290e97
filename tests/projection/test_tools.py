"""The command-line tools, as a user starts them."""

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from nemo_opd.projection import ProjectionMatrix
from tests.projection.conftest import SMALL

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "projection"


def run(tool: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own: inside tools/projection, `import inspect` must still be the standard library's."""
    command = [sys.executable, str(TOOLS / tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("tokenizers")
    for side, name in (("student", "three_digits"), ("teacher", "one_digit")):
        SMALL[name].save_pretrained(base / side)
    return base / "student", base / "teacher"


def test_build_then_inspect(folders: tuple[Path, Path], tmp_path: Path) -> None:
    file, plot = tmp_path / "pair.safetensors", tmp_path / "pair.png"
    built = run("build.py", "--student", folders[0], "--teacher", folders[1], "--output", file, "--top-k", 3)
    assert (built.returncode, built.stderr) == (0, "")
    assert "recommended loss" in built.stdout
    assert ProjectionMatrix.load(file).top_k == 3
    inspected = run("inspect.py", file, "--json", "--plot", plot)
    assert inspected.returncode == 0, inspected.stderr
    assert json.loads(inspected.stdout)["recommended_loss"] == "p_kl"
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("tool", "arguments"), [("build", ["--top-k", "0"]), ("inspect", [])])
def test_a_user_error_is_one_line(
    tool: str, arguments: list[str], folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "nothing.safetensors")
    pair = ["--student", str(folders[0]), "--teacher", str(folders[1])]
    target = ["--output", file] if tool == "build" else [file]
    assert load(tool).main([*pair, *target, *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def load(tool: str) -> ModuleType:
    spec = spec_from_file_location(f"{tool}_tool", TOOLS / f"{tool}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
