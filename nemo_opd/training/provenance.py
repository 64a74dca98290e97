"""Provenance of a run: its command, the versions of its libraries, and its models with their licences."""

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
            _public_name(student.tokenizer_source[1]),
            plan.student_vocab_size,
            read_own_card(student.model),
        ),
        teachers=tuple(
            _teacher_origin(settings, teacher_summary, teacher.vocab_size)
            for settings, teacher_summary, teacher in zip(
                plan.config.active_teachers, summary.teachers, plan.teachers, strict=True
            )
        ),
    )


def _command() -> str:
    """Return the user's command line: `nemo-opd distil …`, or `python SCRIPT …`."""
    program, *arguments = sys.orig_argv[1:] or [""]  # without the interpreter; Hydra replaces sys.argv
    if program.endswith(".py") or program.startswith("-"):
        return shlex.join(["python", program, *arguments])
    return shlex.join([Path(program).name, *arguments])


def _teacher_origin(settings: Teacher, summary: TeacherSummary, vocab_size: int) -> ModelOrigin:
    model = summary.model if settings.cache is None else read_manifest(settings.cache).teacher
    return ModelOrigin(
        name=summary.name,
        model=_public_name(model),
        tokenizer=_public_name(settings.tokenizer_source[1]),
        vocab_size=vocab_size,
        card=_card(settings, model),
        weight=summary.weight,
        loss=summary.loss,
        audit=(*summary.coverage, *summary.warnings),
    )


def _card(settings: Teacher, model: str) -> OwnCard:
    """Return the teacher's model card; empty for a served teacher, whose name need not be one on the hub."""
    return OwnCard() if settings.served is not None else read_own_card(model)


def _public_name(reference: str) -> str:
    return short_name(without_secrets(reference))
