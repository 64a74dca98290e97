"""Every block of the tutorials runs, in the order of its page: files are written, commands and Python are run."""

import os
from itertools import groupby
from pathlib import Path

import pytest

from tests import processes
from tests.site.pages import DOCS, ROOT, Block, blocks

pytestmark = pytest.mark.world

COMMAND = ROOT / "nemo_opd" / "cli" / "__main__.py"


@pytest.mark.parametrize("page", sorted((DOCS / "tutorials").glob("*.md")), ids=lambda page: page.stem)
def test_a_tutorial_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a key, a name or an option that has changed, or a figure that a run does not have."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for kind, group in groupby(blocks(page, "python", "yaml", "bash"), _kind):
        shown = list(group)
        if kind == "file":
            for block in shown:
                assert block.file
                (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        elif kind == "bash":
            for words in (words for block in shown for words in block.commands):
                _run(words, tmp_path)
        else:
            script = tmp_path / "shown.py"
            script.write_text("\n".join(block.text for block in shown), encoding="utf-8")
            processes.script(script)


def _kind(block: Block) -> str:
    return "file" if block.file else block.language


def _run(words: list[str], folder: Path) -> None:
    program, *arguments = words
    if program == "python":
        processes.script(folder / arguments[0])
        return
    assert program == "nemo-opd"
    command = processes.Command(COMMAND, arguments, dict(os.environ), folder)
    command.wait(300)
    assert command.returncode == 0, command.output()
