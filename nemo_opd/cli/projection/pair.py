"""The tokenizers of a projection."""

from argparse import Namespace
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from nemo_opd.alignment import fingerprint
from nemo_opd.errors import ProjectionError
from nemo_opd.models.load import load_tokenizer
from nemo_opd.projection import ProjectionMatrix


@dataclass(frozen=True, slots=True)
class Pair:
    student: PreTrainedTokenizerFast
    teacher: PreTrainedTokenizerFast


def load_pair(student: str, teacher: str, *, keys: tuple[str, str] = ("--student", "--teacher")) -> Pair:
    """Return both tokenizers, with the user's names for them, which are stored in the file.

    Raises ModelError if one cannot be loaded, ProjectionError if both are the same.
    """
    pair = Pair(load_tokenizer(student, key=keys[0]), load_tokenizer(teacher, key=keys[1]))
    pair.student.name_or_path, pair.teacher.name_or_path = student, teacher
    if fingerprint(pair.student) == fingerprint(pair.teacher):
        raise ProjectionError(
            f"{student} and {teacher}: both tokenizers are the same; use type: same_tokenizer (no projection)"
        )
    return pair


def load_file(arguments: Namespace) -> tuple[ProjectionMatrix, Pair]:
    """Return FILE and its tokenizers: --student and --teacher, or the ones that the file names.

    Raises ProjectionError if the file is not readable, names no tokenizers, or belongs to other ones.
    """
    header = ProjectionMatrix.load(arguments.file)
    student, teacher = arguments.student or header.student_name, arguments.teacher or header.teacher_name
    if not student or not teacher:
        side = "teacher" if student else "student"
        raise ProjectionError(f"{arguments.file} does not name its {side}'s tokenizer; give --{side}")
    keys = [
        f"--{side}" if getattr(arguments, side) else f"the {side} that {arguments.file} names (--{side} overrides it)"
        for side in ("student", "teacher")
    ]
    pair = load_pair(student, teacher, keys=(keys[0], keys[1]))
    return ProjectionMatrix.load(arguments.file, pair.student, pair.teacher), pair
