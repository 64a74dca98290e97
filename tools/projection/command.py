"""What the commands of this folder share: arguments, tokenizers, progress, and how they end."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from transformers import PreTrainedTokenizerFast

from nemo_opd.alignment import fingerprint
from nemo_opd.errors import OPDError, ProjectionError
from nemo_opd.models.load import load_tokenizer
from nemo_opd.projection import ProjectionMatrix

SUFFIX = ".safetensors"
Counter = Callable[[int, int], None]
"""(done, in all)"""


@dataclass(frozen=True, slots=True)
class Pair:
    student: PreTrainedTokenizerFast
    teacher: PreTrainedTokenizerFast


def make_parser(description: str | None, epilog: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_file(parser: argparse.ArgumentParser, help: str = "a projection made by a command of this folder") -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help=help)


def add_pair(parser: argparse.ArgumentParser, *, required: bool) -> None:
    where = "" if required else "; needed where it is no longer where FILE says it was"
    for side in ("student", "teacher"):
        text = f"folder or hub name of the {side}'s tokenizer, or a demo: name{where}"
        parser.add_argument(f"--{side}", required=required, metavar="TOKENIZER", help=text)


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help=f"the {SUFFIX} file to write")


def add_top_k(parser: argparse.ArgumentParser, default: int | None = 4) -> None:
    text = "teacher tokens kept for a student token" + (f" (default {default})" if default else "")
    parser.add_argument("--top-k", type=int, default=default, required=default is None, metavar="K", help=text)


def add_roles(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--roles",
        nargs="+",
        action="extend",
        default=[],
        metavar="TOKEN=ROLE",
        help="what special tokens of either side mean, where it is not known by itself: equal roles are paired. "
        "Several roles are separated by commas, none (TOKEN=) leaves the token unpaired",
    )


def roles_of(pairs: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Token → its roles. Raises ProjectionError for an argument without `=`."""
    roles = {}
    for pair in pairs:
        token, equals, names = pair.rpartition("=")  # tokens may hold `=`, roles do not
        if not equals or not token:
            raise ProjectionError(f"--roles {pair}: write TOKEN=ROLE, such as '<|im_end|>=end_of_turn'")
        roles[token] = tuple(name for name in names.split(",") if name)
    return roles


def load_pair(student: str, teacher: str, *, keys: tuple[str, str] = ("--student", "--teacher")) -> Pair:
    """Both tokenizers, named as the user named them, which is what a file remembers.

    Raises ModelError for one that cannot be loaded, ProjectionError where both are the same.
    """
    pair = Pair(load_tokenizer(student, key=keys[0]), load_tokenizer(teacher, key=keys[1]))
    pair.student.name_or_path, pair.teacher.name_or_path = student, teacher
    if fingerprint(pair.student) == fingerprint(pair.teacher):
        raise ProjectionError(
            f"{student} and {teacher}: both tokenizers are the same; use type: same_tokenizer (no projection)"
        )
    return pair


def load_file(arguments: argparse.Namespace) -> tuple[ProjectionMatrix, Pair]:
    """FILE and its tokenizers: --student and --teacher, else those that the file names.

    Raises ProjectionError for a file that is not readable, names no tokenizers or belongs to others.
    """
    names = ProjectionMatrix.load(arguments.file)
    student, teacher = arguments.student or names.student_name, arguments.teacher or names.teacher_name
    if not student or not teacher:
        side = "teacher" if student else "student"
        raise ProjectionError(f"{arguments.file} does not name its {side}'s tokenizer; give --{side}")
    keys = [
        f"--{side}" if getattr(arguments, side) else f"the {side} that {arguments.file} names (--{side} overrides it)"
        for side in ("student", "teacher")
    ]
    pair = load_pair(student, teacher, keys=(keys[0], keys[1]))
    return ProjectionMatrix.load(arguments.file, pair.student, pair.teacher), pair


class Steps:
    """A line a step, with a bar where the step counts."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def begin(self, name: str) -> Counter:
        """Ends the step before."""
        self.end()
        self._task = task = self._progress.add_task(name, total=None)
        return lambda done, total: self._progress.update(task, completed=done, total=total)

    def end(self) -> None:
        if self._task is not None and self._progress.tasks[self._task].total is None:
            self._progress.update(self._task, completed=1, total=1)


@contextmanager
def steps(console: Console) -> Iterator[Steps]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        shown = Steps(progress)
        yield shown
        shown.end()


def check_output(path: Path) -> None:
    """Raises ProjectionError for what could not be written, before minutes are spent on it."""
    if path.suffix != SUFFIX:
        raise ProjectionError(f"--output {path}: a projection is a {SUFFIX} file; give it that suffix")
    if path.is_dir():
        raise ProjectionError(f"--output {path}: it is a folder; name a file in it")
    blocking = next((parent for parent in path.absolute().parents if parent.exists()), None)
    if blocking is not None and not blocking.is_dir():
        raise ProjectionError(f"--output {path}: {blocking} is a file, so there can be no folder of that name")


def write(matrix: ProjectionMatrix, path: Path, console: Console) -> None:
    """A whole file or none, and a line that says so."""
    matrix.save(path)
    rows = int((matrix.row_lengths > 0).sum())
    size = path.stat().st_size / 1e6
    console.print(
        f"wrote {path}: {rows:,} of {matrix.student_vocab_size:,} rows, {int(matrix.exact.sum()):,} exact, up to "
        f"{matrix.row_lengths.max(initial=0)} teacher tokens each ({size:.1f} MB)",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def run(command: Callable[[argparse.Namespace, Console], None], arguments: argparse.Namespace) -> int:
    """The exit status; a user's error is one line on stderr."""
    try:
        command(arguments, Console())
    except (OPDError, OSError) as error:
        print("error:", " ".join(str(error).split("\n")), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0
