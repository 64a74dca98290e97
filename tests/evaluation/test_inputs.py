"""Checks of an evaluation's settings before PyTorch is imported."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.composition import ROOT

pytestmark = pytest.mark.world
SCRIPT = """
import contextlib, io, json, runpy, sys
for arguments in json.loads(sys.argv[1]):
    sys.argv, status = ["evaluate", *arguments], None
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            runpy.run_path("examples/evaluate.py", run_name="__main__")
        except SystemExit as end:
            status = end.code
    imported = [name for name in ("torch", "transformers", "datasets") if name in sys.modules]
    print(json.dumps([status, errors.getvalue(), imported]))
"""
REFUSED = {
    "model=/nowhere": "model=/nowhere: there is no such folder",
    "tokenizer=/nowhere": "tokenizer=/nowhere: there is no such folder",
    "chat_template=/no.jinja": "chat_template=/no.jinja: ",
    "data.arrow_files=/no.arrow reward=numeric model=demo:student": "data.arrow_files='/no.arrow' does not exist",
    "model=demo:student benchmarks=[gsm8k_]": (
        "benchmarks.0.task='gsm8k_': lm-eval has no such task; similar names are gsm8k"
    ),
    "+reward.extract={type:json,schema_file:README.md}": (
        "reward.extract.schema_file=README.md: not a JSON schema: Expecting value"
    ),
    "model=demo:student data.arrow_files=[]": "sets, data and benchmarks name nothing to ask; set one of them",
    "+reward.extract={type:regex,pattern:'(a'}": "reward.extract.pattern='(a': not a regular expression: ",
}
"""Start of the last error line, keyed by overrides."""


def refusals(cases: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Run all cases in one new process: return each case's last error line and its heavy imports."""
    command = [sys.executable, "-c", SCRIPT, json.dumps([overrides.split() for overrides in cases])]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    results = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
    assert [status for status, _, _ in results] == [1] * len(cases), results
    return [(errors.splitlines()[-1], imported) for _, errors, imported in results]


def test_wrong_settings_are_refused_before_pytorch_is_imported() -> None:
    """Bug: the error comes ten seconds later."""
    for message, (last, imported) in zip(REFUSED.values(), refusals([*REFUSED]), strict=True):
        assert last.startswith(f"error: {message}")
        assert imported == []


def test_missing_data_and_code_of_tasks(tmp_path: Path) -> None:
    """Bugs: an error only after PyTorch is imported; a downloaded task folder whose Python files run unconfirmed."""
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/gone.json}}}}\ntest_split: test\n"
    (tmp_path / "mine.yaml").write_text(f"task: mine\n{data}doc_to_text: text\ndoc_to_target: text\n")
    (tmp_path / "attack.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef load(**_): return {{}}\n")
    (tmp_path / "theirs.yaml").write_text("task: theirs\ncustom_dataset: !function attack.load\n")
    model = f"model=demo:student +task_folder={tmp_path}"
    mine, theirs = (f"{model} benchmarks=[{task}]" for task in ("mine", "theirs"))
    ((unconfirmed, _),) = refusals([theirs])
    assert "write confirm_task_code=true if you trust the folder" in unconfirmed
    assert not (tmp_path / "ran").exists()
    (last, imported), _ = refusals([f"{task} confirm_task_code=true" for task in (mine, theirs)])
    assert last.startswith("error: benchmarks.0.task=mine: it cannot be read (FileNotFoundError: Unable to find")
    assert imported == ["datasets"]
    assert (tmp_path / "ran").exists()
