"""Writes a commented configuration for your models and data, and a schema for completion in editors."""

import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from nemo_opd.cli.command import Command
from nemo_opd.errors import ConfigError
from nemo_opd.files import write_atomically
from nemo_opd.paths import configs_dir

TEMPLATES = Path(__file__).parent / "templates"
SCHEMA = "run.schema.json"


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write to; created if needed")
    parser.add_argument("--on-policy", action="store_true", help="for a student that learns from its own answers")


def _write(arguments: Namespace, console: Console) -> None:
    """Write the settings and their schema.

    Raises ConfigError if the file exists, StorageError if the folder cannot be written.
    """
    folder: Path = arguments.folder
    name, verb = ("distil_on_policy", "distil-on-policy") if arguments.on_policy else ("distil", "distil")
    file = folder / f"{name}.yaml"
    if file.exists():
        raise ConfigError(f"{file} exists already; name another folder, or remove it")
    for source, copy in ((configs_dir() / "schema" / "run.json", folder / SCHEMA), (TEMPLATES / file.name, file)):
        write_atomically(copy, source.read_bytes(), instead="name another folder")
    print(f"wrote {file}; see what would run: nemo-opd {verb} {shlex.quote(str(file))} run.dry_run=true")


COMMAND = Command(
    __doc__,
    """\
examples:
  nemo-opd init .                     distil.yaml, ready to edit
  nemo-opd init mine --on-policy      mine/distil_on_policy.yaml
""",
    _add_arguments,
    _write,
)
