"""What is checked of an evaluation's paths before PyTorch is imported."""

import subprocess
import sys

import pytest

from tests.composition import ROOT

SCRIPT = """
import runpy, sys
sys.argv = ["evaluate", *sys.argv[1:]]
try:
    runpy.run_path("examples/evaluate.py", run_name="__main__")
finally:
    print([name for name in ("torch", "transformers", "datasets") if name in sys.modules])
"""


@pytest.mark.world
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("model=/nowhere", "error: model=/nowhere: there is no such folder"),
        ("tokenizer=/nowhere", "error: tokenizer=/nowhere: there is no such folder"),
        ("chat_template=/no.jinja", "error: chat_template=/no.jinja: "),
        (
            "data.arrow_files=/no.arrow reward=numeric model=demo:student",
            "error: data.arrow_files='/no.arrow' does not exist",
        ),
    ],
)
def test_a_wrong_path_is_refused_before_pytorch_is_imported(overrides: str, says: str) -> None:
    """Bug: ten seconds later."""
    command = [sys.executable, "-c", SCRIPT, *overrides.split()]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stdout == "[]\n"
    assert refused.stderr.splitlines()[-1].startswith(says)
