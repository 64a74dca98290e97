"""The origin of a run: its models with their licences, its command, the versions of libraries."""

import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

from nemo_opd.config.secrets import without_secrets
from nemo_opd.config.teacher import Teacher
from nemo_opd.logging import RunSummary
from nemo_opd.logging.base import TeacherSummary
from nemo_opd.logging.provenance import ModelOrigin, Provenance
from nemo_opd.models.own_card import OwnCard, read_own_card
from nemo_opd.projection.report import short_name
from nemo_opd.teacher_cache.manifest import read_manifest
from nemo_opd.training.plan import Plan
from nemo_opd.version import package_version

_LIBRARIES = ("torch", "transformers", "tokenizers", "peft")


def provenance(plan: Plan, summary: RunSummary) -> Provenance:
    student = plan.config.student
    return Provenance(
        command=without_secrets(_command()),
        versions={
            "python": platform.python_version(),
            "nemo-opd": package_version(),
            **{name: version(name) for name in _LIBRARIES},
        },
        student=ModelOrigin(
            "student",
            short_name(summary.student),
            _shown(student.tokenizer_source[1]),
            plan.student_vocab_size,
            read_own_card(student.model),
        ),
        teachers=tuple(
            _of_teacher(settings, shown, each.vocab_size)
            for settings, shown, each in zip(plan.config.active_teachers, summary.teachers, plan.teachers, strict=True)
        ),
    )


def _command() -> str:
    """Return the command line as it was given: `nemo-opd distil …`, or `python SCRIPT …`."""
    program, *arguments = sys.orig_argv[1:] or [""]  # without the interpreter; Hydra has replaced sys.argv
    if program.endswith(".py") or program.startswith("-"):
        return shlex.join(["python", program, *arguments])
    return shlex.join([Path(program).name, *arguments])


def _of_teacher(settings: Teacher, shown: TeacherSummary, vocab_size: int) -> ModelOrigin:
    model = shown.model if settings.cache is None else read_manifest(settings.cache).teacher
    return ModelOrigin(
        name=shown.name,
        model=_shown(model),
        tokenizer=_shown(settings.tokenizer_source[1]),
        vocab_size=vocab_size,
        card=_card(settings, model),
        weight=shown.weight,
        loss=shown.loss,
        audit=(*shown.coverage, *shown.warnings),
    )


def _card(settings: Teacher, model: str) -> OwnCard:
    """Return the contents of the teacher's card. The hub is not asked about a name that a server gives to its model."""
    return OwnCard() if settings.served is not None else read_own_card(model)


def _shown(reference: str) -> str:
    return short_name(without_secrets(reference))
