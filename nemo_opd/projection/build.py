"""Builds the projection of a pair of tokenizers: all passes of methods.md §2, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_opd.alignment.roles import RoleOverrides
from nemo_opd.errors import ProjectionError
from nemo_opd.projection.byte_prefix import add_byte_prefix_of
from nemo_opd.projection.embedding import EmbeddingSource, add_embeddings_of
from nemo_opd.projection.exact import exact_map_of
from nemo_opd.projection.matrix import ProjectionMatrix
from nemo_opd.projection.multi_token import add_multi_token_of
from nemo_opd.projection.pair import read_pair
from nemo_opd.projection.shared_prefix import add_shared_prefix_of
from nemo_opd.projection.sort_and_cut import sort_and_cut
from nemo_opd.projection.spelling import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """Student token → the teacher tokens that spell it: the same bytes or role, else the teacher's pieces of its bytes.

    `reverse` and `embeddings` run the optional passes; `roles` as for TokenAligner. Rows of special tokens without a
    partner and of holes stay empty. The byte-prefix and shared-prefix maps are always made.
    Raises AlignmentError for a tokenizer whose pieces cannot be exact, ProjectionError for top_k < 1 or an empty map.
    """
    if top_k < 1:
        raise ProjectionError(f"top_k is {top_k}, but a row needs room for one entry; give 1 or more")
    pair = read_pair(student_tokenizer, teacher_tokenizer, roles)
    matrix = exact_map_of(pair)
    matrix = add_multi_token_of(matrix, pair, width=top_k, reverse=reverse, progress=progress)
    if embeddings is not None:
        matrix = add_embeddings_of(matrix, pair, embeddings, progress)
    matrix = sort_and_cut(matrix, top_k)
    if not matrix.row_lengths.any():
        raise ProjectionError(
            f"no token of {matrix.student_name} can be spelled with {matrix.teacher_name}; "
            "a projection between them would be empty"
        )
    return add_shared_prefix_of(add_byte_prefix_of(matrix, pair), pair)
