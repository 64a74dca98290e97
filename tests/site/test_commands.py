"""Every command in the documentation is valid, and its settings compose; test_tutorials runs commands of tutorials."""

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
"""The call in a script of examples/ or tools/ with the verb that the script runs."""


def arguments_of(words: list[str]) -> list[str] | None:
    """Return the arguments that a shell command passes to `nemo-opd`; None if it runs another program."""
    while words and (
        re.match(r"[A-Z_]+=", words[0]) or words[0] in ("uv", "run", "torchrun") or words[0].startswith("-")
    ):
        words = words[1:]
    words = words[: next((i for i, word in enumerate(words) if word in (">", "|", "&&")), None)]
    if words[:1] == [PROGRAM]:
        return words[1:]
    if words and words[0].startswith(("examples/", "tools/", "benchmarks/", "docs/")):
        verb = VERB.search((ROOT / words[0]).read_text(encoding="utf-8"))
        return [*re.findall(r'"([\w-]+)"', verb[1]), *words[1:]] if verb else None
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
    """Bug: a verb, an option or a setting was renamed, or does not accept the value."""
    monkeypatch.chdir(tmp_path)
    names, verb = _find(arguments)
    assert verb is not None, names
    command, options = verb.command(), arguments[len(names) :]
    if not isinstance(command, SettingsCommand):
        parser = ArgumentParser()
        command.add_arguments(parser)
        parser.parse_args(options)
    elif "--help" not in options and page.name != "troubleshooting.md":  # it shows invalid commands
        write_files_of(page, tmp_path)
        composed = [
            word.replace("--config-name", "--config")
            for word in options
            if not word.startswith("--") or "config" in word
        ]
        compose_settings(
            [word for word in composed if word != "job"], command.model, CONFIGS, command.config_name(composed)
        )


def write_files_of(page: Path, folder: Path) -> None:
    """Write the files that a page's commands read: its settings, the templates of `init` and a checkout's recipes."""
    for block in blocks(page, "yaml"):
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
    (folder / "configs").symlink_to(CONFIGS)
    shutil.copytree(TEMPLATES, folder / "mine")
    shutil.copyfile(TEMPLATES / "distil.yaml", folder / "run.yaml")
