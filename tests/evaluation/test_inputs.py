"""What is checked of an evaluation's paths before PyTorch is imported."""

import subprocess
import sys
from pathlib import Path

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
        ("model=/nowhere", "model=/nowhere: there is no such folder"),
        ("tokenizer=/nowhere", "tokenizer=/nowhere: there is no such folder"),
        ("chat_template=/no.jinja", "chat_template=/no.jinja: "),
        (
            "data.arrow_files=/no.arrow reward=numeric model=demo:student",
            "data.arrow_files='/no.arrow' does not exist",
        ),
        (
            "model=demo:student benchmarks=[gsm8k_]",
            "benchmarks.0.task='gsm8k_': lm-eval has no such task; similar names are gsm8k",
        ),
        (
            "+reward.extract={type:json,schema_file:README.md}",
            "reward.extract.schema_file=README.md: not a JSON schema: Expecting value",
        ),
        ("model=demo:student data.arrow_files=[]", "sets, data and benchmarks name nothing to ask; set one of them"),
        (
            "+reward.extract={type:regex,pattern:'(a'}",
            "reward.extract.pattern='(a': not a regular expression: ",
        ),
    ],
)
def test_what_is_wrong_is_refused_before_pytorch_is_imported(overrides: str, says: str) -> None:
    """Bug: ten seconds later."""
    last, imported = refusal(overrides)
    assert last.startswith(f"error: {says}")
    assert imported == "[]"


@pytest.mark.world
def test_missing_data_of_a_task_are_found_before_pytorch_is_imported(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    task = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/gone.json}}}}\ntest_split: test\n"
    (tmp_path / "mine.yaml").write_text(f"task: mine\n{task}doc_to_text: text\ndoc_to_target: text\n")
    last, imported = refusal(f"model=demo:student benchmarks=[mine] +task_folder={tmp_path} confirm_task_code=true")

    assert last.startswith("error: benchmarks.0.task=mine: it cannot be read (FileNotFoundError: Unable to find")
    assert imported == "['datasets']"


def refusal(overrides: str) -> tuple[str, str]:
    """Return the last line of the error, and the list of what was imported."""
    command = [sys.executable, "-c", SCRIPT, *overrides.split()]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    return refused.stderr.splitlines()[-1], refused.stdout.splitlines()[-1]


@pytest.mark.world
def test_the_code_of_tasks_is_confirmed(tmp_path: Path) -> None:
    """Bug: a downloaded folder of tasks ran its Python files during the check of the settings."""
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    (tmp_path / "attack.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef load(**_): return {{}}\n")
    (tmp_path / "mine.yaml").write_text("task: mine\ncustom_dataset: !function attack.load\n")
    last, _ = refusal(f"model=demo:student benchmarks=[mine] +task_folder={tmp_path}")
    assert "write confirm_task_code=true if you trust the folder" in last
    assert not (tmp_path / "ran").exists()
    refusal(f"model=demo:student benchmarks=[mine] +task_folder={tmp_path} confirm_task_code=true")
    assert (tmp_path / "ran").exists()
