"""Every block of the tutorials runs, in the order of its page: files are written, commands and Python are run.

Everything runs in this process, which saves imports. Rows are packed from smaller blocks of texts, as a block is read
before the first step.
"""

import runpy
from itertools import groupby
from pathlib import Path

import pytest

from nemo_opd.data import order
from tests.exit_status import exit_status
from tests.site.pages import DOCS, Block, blocks

pytestmark = pytest.mark.world


@pytest.mark.parametrize("page", sorted((DOCS / "tutorials").glob("*.md")), ids=lambda page: page.stem)
def test_a_tutorial_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a key, a name or an option has changed, or a run lacks a metric."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(order, "BLOCK", 64)
    for kind, group in groupby(blocks(page, "python", "yaml", "bash"), _kind):
        group_blocks = list(group)
        if kind == "file":
            for block in group_blocks:
                assert block.file
                Path(block.file).write_text(block.text, encoding="utf-8")
        elif kind == "bash":
            for words in (words for block in group_blocks for words in block.commands):
                _run(words)
        else:
            Path("shown.py").write_text("\n".join(block.text for block in group_blocks), encoding="utf-8")
            runpy.run_path("shown.py", run_name="__main__")


def _kind(block: Block) -> str:
    return "file" if block.file else block.language


def _run(words: list[str]) -> None:
    program, *arguments = words
    if program == "python":
        runpy.run_path(arguments[0], run_name="__main__")
        return
    assert program == "nemo-opd"
    assert exit_status(*arguments) == 0, words
