"""Sparse maps between vocabularies, built offline, one per student–teacher pair (METHODS §2)."""

from nemo_opd.projection.audit import Audit, Coverage, audit, recommended_loss
from nemo_opd.projection.build import build_projection
from nemo_opd.projection.cache import cached_projection
from nemo_opd.projection.matrix import ProjectionMatrix

__all__ = [
    "Audit",
    "Coverage",
    "ProjectionMatrix",
    "audit",
    "build_projection",
    "cached_projection",
    "recommended_loss",
]
