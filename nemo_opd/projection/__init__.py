"""Sparse maps between vocabularies, built offline, one for each student–teacher pair (methods.md §2)."""

from nemo_opd.projection import nemo_rl
from nemo_opd.projection.build import Audit, Coverage, audit, build_projection, cached_projection
from nemo_opd.projection.embedding import EmbeddingSource, add_embeddings
from nemo_opd.projection.exact import exact_map
from nemo_opd.projection.io import BuilderOptions
from nemo_opd.projection.matrix import ProjectionMatrix, sort_and_cut
from nemo_opd.projection.retokenization import add_byte_prefix, add_multi_token, add_shared_prefix

__all__ = [
    "Audit",
    "BuilderOptions",
    "Coverage",
    "EmbeddingSource",
    "ProjectionMatrix",
    "add_byte_prefix",
    "add_embeddings",
    "add_multi_token",
    "add_shared_prefix",
    "audit",
    "build_projection",
    "cached_projection",
    "exact_map",
    "nemo_rl",
    "sort_and_cut",
]
