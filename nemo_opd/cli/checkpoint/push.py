"""Uploads a model's folder, with its card, to the Hugging Face Hub."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from nemo_opd.cli.command import Command
from nemo_opd.config.hub import require_repo
from nemo_opd.errors import CheckpointError
from nemo_opd.logging.busy import busy

_MODELS = ("config.json", "adapter_config.json")
EPILOG = """\
Uses the token of HF_TOKEN or `hf auth login`. Only the folder's files are sent; README.md is the card. A repository
that does not exist is created, private without --public; the visibility of an existing one is not changed.

example:
  nemo-opd checkpoint push --model RUN/final --repo me/my-student
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, type=Path, metavar="FOLDER", help="such as RUN/final, or a folder written by to-hf"
    )
    parser.add_argument("--repo", required=True, metavar="USER/NAME", help="repository on the hub")
    parser.add_argument("--public", action="store_true", help="make a new repository public")


def upload(arguments: Namespace, console: Console) -> None:
    """Push the folder. Raises an OPDError if it is not a model's, or if the hub rejects it."""
    from nemo_opd.models.hub import push, require_hub

    folder, repo = arguments.model, arguments.repo
    _require_model(folder)
    try:
        require_repo(repo)
    except ValueError as error:
        raise CheckpointError(f"--repo={repo}: {error}") from error
    require_hub(f"--repo={repo}")
    with busy(f"pushing {folder}"):
        url = push(folder, repo, private=not arguments.public)
    print(f"pushed {folder} to {url}")


def _require_model(folder: Path) -> None:
    """Raise CheckpointError if the folder has no model or adapter; the message suggests a subfolder that has one."""
    if any((folder / name).is_file() for name in _MODELS):
        return
    model = next((folder / name for name in ("final", "student") if (folder / name).is_dir()), None)
    way_out = f"its model is {model}" if model else "name a folder such as RUN/final, or make one with checkpoint to-hf"
    raise CheckpointError(f"--model={folder}: there is no {' or '.join(_MODELS)}; {way_out}")


COMMAND = Command(__doc__, EPILOG, add_arguments, upload)
