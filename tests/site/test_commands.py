"""Every command that the documentation shows is one of the real command line, and its settings compose.

Those of tutorials are run by test_tutorials.
"""

import re
import shutil
from argparse import ArgumentParser
from pathlib import Path

import pytest

from nemo_opd.cli.init import TEMPLATES
from nemo_opd.cli.main import PROGRAM, _find
from nemo_opd.cli.settings_verbs import SettingsCommand
from nemo_opd.config.composition import compose_settings
from tests.composition import CONFIGS
from tests.site.pages import PAGES, ROOT, blocks

VERB = re.compile(r"main\(\[(.*?), \*sys\.argv")
"""In a script of examples/ or tools/: the verb that it is."""


def arguments_of(words: list[str]) -> list[str] | None:
    """Return the arguments of `nemo-opd` that a command of the shell comes to; None if it is another program."""
    while words and (
        re.match(r"[A-Z_]+=", words[0]) or words[0] in ("uv", "run", "torchrun") or words[0].startswith("-")
    ):
        words = words[1:]
    words = words[: next((i for i, word in enumerate(words) if word in (">", "|", "&&")), None)]
    if words[:1] == [PROGRAM]:
        return words[1:]
    if words and words[0].startswith(("examples/", "tools/", "benchmarks/", "docs/")):
        found = VERB.search((ROOT / words[0]).read_text(encoding="utf-8"))
        return [*re.findall(r'"([\w-]+)"', found[1]), *words[1:]] if found else None
    return None


COMMANDS = [
    pytest.param(page, arguments, id=f"{page.stem}: {' '.join(arguments)}")
    for page in PAGES
    if page.parent.name != "tutorials"
    for block in blocks(page, "bash", "console")
    for words in block.commands
    if (arguments := arguments_of(words))
]


def test_most_pages_show_commands() -> None:
    assert len(COMMANDS) > 60


@pytest.mark.parametrize(("page", "arguments"), COMMANDS)
def test_a_command_is_one(page: Path, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a verb, an option or a setting that has another name by now, or a value that it does not take."""
    monkeypatch.chdir(tmp_path)
    names, verb = _find(arguments)
    assert verb is not None, names
    command, rest = verb.command(), arguments[len(names) :]
    if not isinstance(command, SettingsCommand):
        parser = ArgumentParser()
        command.add_arguments(parser)
        parser.parse_args(rest)
    elif "--help" not in rest and page.name != "troubleshooting.md":  # which shows what is refused
        write_files_of(page, tmp_path)
        composed = [
            word.replace("--config-name", "--config") for word in rest if not word.startswith("--") or "config" in word
        ]
        compose_settings(
            [word for word in composed if word != "job"], command.model, CONFIGS, command.config_name(composed)
        )


def write_files_of(page: Path, folder: Path) -> None:
    """Write what the commands of a page read: the settings that it shows, those of `init`, those of a checkout."""
    for block in blocks(page, "yaml"):
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
    (folder / "configs").symlink_to(CONFIGS)
    shutil.copytree(TEMPLATES, folder / "mine")
    shutil.copyfile(TEMPLATES / "distil.yaml", folder / "run.yaml")
