"""Projections that were built before."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_opd.alignment.backend import fingerprint
from nemo_opd.alignment.roles import RoleOverrides, roles_of
from nemo_opd.errors import ProjectionError
from nemo_opd.paths import cache_dir
from nemo_opd.projection.build import build_projection
from nemo_opd.projection.io import VERSION
from nemo_opd.projection.matrix import ProjectionMatrix
from nemo_opd.projection.options import frozen_roles
from nemo_opd.projection.spelling import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

BUILDER_VERSION = 3
"""Raised when the same tokenizers give another matrix than before."""


def cached_projection(
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    top_k: int = 4,
    progress: Progress | None = None,
    *,
    reverse: bool = False,
    roles: RoleOverrides | None = None,
) -> tuple[ProjectionMatrix, Path]:
    """The projection of a pair and the cache file that holds it; built where there is none or it is damaged.

    Several processes may do this at once: each writes a whole file, and they are all the same.
    Raises AlignmentError and ProjectionError as `build_projection` does.
    """
    path = cache_dir("projection") / _file_name(student_tokenizer, teacher_tokenizer, top_k, reverse, roles)
    if path.exists():
        try:
            return ProjectionMatrix.load(path, student_tokenizer, teacher_tokenizer), path
        except ProjectionError as error:
            logger.warning("building a projection again: %s", error)
    matrix = build_projection(student_tokenizer, teacher_tokenizer, top_k, progress, reverse=reverse, roles=roles)
    matrix.save(path)
    return matrix, path


def _file_name(
    student: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    top_k: int,
    reverse: bool,
    roles: RoleOverrides | None,
) -> str:
    """Names all the matrix depends on. Roles depend on more than the fingerprints, such as which token is eos."""
    meaning = repr(
        (sorted(roles_of(student, roles).items()), sorted(roles_of(teacher, roles).items()), frozen_roles(roles))
    )
    parts = (
        fingerprint(student)[:16],
        fingerprint(teacher)[:16],
        hashlib.sha256(meaning.encode()).hexdigest()[:8],
        f"k{top_k}{'r' if reverse else ''}",
        f"v{VERSION}.{BUILDER_VERSION}",
    )
    return "-".join(parts) + ".safetensors"
