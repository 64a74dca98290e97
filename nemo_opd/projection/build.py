"""Complete build of a projection, with all passes of methods.md §2 in order, and its cache."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_opd.alignment.backend import fingerprint
from nemo_opd.alignment.roles import RoleOverrides, roles_of
from nemo_opd.errors import ProjectionError
from nemo_opd.paths import cache_dir
from nemo_opd.projection.embedding import EmbeddingSource, embedding_pass
from nemo_opd.projection.entries import check_width, sort_and_cut
from nemo_opd.projection.exact import exact_pass
from nemo_opd.projection.io import VERSION
from nemo_opd.projection.matrix import ProjectionMatrix
from nemo_opd.projection.multi_token import multi_token_pass
from nemo_opd.projection.options import frozen_roles
from nemo_opd.projection.pair import read_pair
from nemo_opd.projection.prefix_maps import byte_prefix_pass, shared_prefix_pass
from nemo_opd.projection.spelling import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_BUILDER_VERSION = 4
"""Increment when the same tokenizers yield another matrix."""


def build_projection(
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    top_k: int = 4,
    progress: Progress | None = None,
    *,
    reverse: bool = False,
    embeddings: EmbeddingSource | None = None,
    roles: RoleOverrides | None = None,
) -> ProjectionMatrix:
    """Map each student token to the teacher token with the same bytes or role, otherwise to the teacher's pieces of its
    bytes.

    `reverse` and `embeddings` run the optional passes; `roles` as for TokenAligner. Rows of special tokens without a
    partner and of holes stay empty. The byte-prefix and shared-prefix maps are always built.

    Raises AlignmentError for a tokenizer whose pieces cannot be exact, ProjectionError for top_k < 1 or an empty map.
    """
    check_width("top_k", top_k)
    pair = read_pair(student_tokenizer, teacher_tokenizer, roles)
    matrix = exact_pass(pair)
    matrix = multi_token_pass(matrix, pair, width=top_k, reverse=reverse, progress=progress)
    if embeddings is not None:
        matrix = embedding_pass(matrix, pair, embeddings, progress)
    matrix = sort_and_cut(matrix, top_k)
    if not matrix.row_lengths.any():
        raise ProjectionError(
            f"no token of {matrix.student_name} can be spelled with {matrix.teacher_name}; "
            "a projection between them would be empty"
        )
    return shared_prefix_pass(byte_prefix_pass(matrix, pair), pair)


def cached_projection(
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    top_k: int = 4,
    progress: Progress | None = None,
    *,
    reverse: bool = False,
    roles: RoleOverrides | None = None,
) -> tuple[ProjectionMatrix, Path]:
    """Return a pair's projection and the cache file that holds it; build it if the file is missing or damaged.

    Several processes may do this at once: each writes a complete file, and all files are equal. Raises AlignmentError
    and ProjectionError as `build_projection` does.
    """
    path = cache_dir("projection") / _file_name(student_tokenizer, teacher_tokenizer, top_k, reverse, roles)
    if path.exists():
        try:
            return ProjectionMatrix.load(path, student_tokenizer, teacher_tokenizer), path
        except ProjectionError as error:
            logger.warning("rebuilding a projection: %s", error)
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
    """Name everything the matrix depends on. Roles depend on more than fingerprints, such as which token is eos."""
    meaning = repr(
        (sorted(roles_of(student, roles).items()), sorted(roles_of(teacher, roles).items()), frozen_roles(roles))
    )
    parts = (
        fingerprint(student)[:16],
        fingerprint(teacher)[:16],
        hashlib.sha256(meaning.encode()).hexdigest()[:8],
        f"k{top_k}{'r' if reverse else ''}",
        f"v{VERSION}.{_BUILDER_VERSION}",
    )
    return "-".join(parts) + ".safetensors"
