"""Arguments that several verbs share."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from nemo_opd.errors import ProjectionError

_SUFFIX = ".safetensors"


def add_file(parser: ArgumentParser, help: str = "a projection written by another pass") -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help=help)


def add_pair(parser: ArgumentParser, *, required: bool) -> None:
    condition = "" if required else "; needed if it has moved since FILE was written"
    for side in ("student", "teacher"):
        text = f"folder or hub name of the {side}'s tokenizer, or a demo: name{condition}"
        parser.add_argument(f"--{side}", required=required, metavar="TOKENIZER", help=text)


def add_output(parser: ArgumentParser) -> None:
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help=f"the {_SUFFIX} file to write")


def add_top_k(parser: ArgumentParser, default: int | None = 4) -> None:
    text = "teacher tokens kept per student token" + (f" (default {default})" if default else "")
    parser.add_argument("--top-k", type=int, default=default, required=default is None, metavar="K", help=text)


def add_roles(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--roles",
        nargs="+",
        action="extend",
        default=[],
        metavar="TOKEN=ROLE",
        help="roles of special tokens of either side that are not detected; tokens with equal roles are paired. "
        "Separate several roles by commas; no role (TOKEN=) leaves the token unpaired",
    )


def roles_of(pairs: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return token → roles. Raises ProjectionError for an argument without `=`."""
    roles = {}
    for pair in pairs:
        token, equals, names = pair.rpartition("=")  # tokens may hold `=`, roles do not
        if not equals or not token:
            raise ProjectionError(f"--roles {pair}: write TOKEN=ROLE, such as '<|im_end|>=end_of_turn'")
        roles[token] = tuple(name for name in names.split(",") if name)
    return roles


def check_output(path: Path) -> None:
    """Raise ProjectionError if the file could not be written, before minutes are spent on it."""
    if path.suffix != _SUFFIX:
        raise ProjectionError(f"--output {path}: a projection is a {_SUFFIX} file; give it that suffix")
    if path.is_dir():
        raise ProjectionError(f"--output {path}: it is a folder; name a file in it")
    blocking = next((parent for parent in path.absolute().parents if parent.exists()), None)
    if blocking is not None and not blocking.is_dir():
        raise ProjectionError(f"--output {path}: {blocking} is a file, so it cannot be a folder; name another path")
