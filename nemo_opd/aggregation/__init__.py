"""Combination of several teachers' losses into one objective (methods.md §6)."""

from nemo_opd.aggregation.confidence import weighted_by_confidence
from nemo_opd.aggregation.objective import TERMS, ObjectiveTerms, TermName
from nemo_opd.aggregation.parts import PART, SHARE, Divisor, TeacherLoss, TeacherLosses, build_parts, kd_of
from nemo_opd.aggregation.privilege import gap
from nemo_opd.aggregation.rules import apply_teacher_weights
from nemo_opd.aggregation.scores import (
    TokenScore,
    joined_scores,
    mean_logprob,
    nats_by_score,
    sequence_scores,
    token_nats,
)
from nemo_opd.aggregation.shares import coverage_metrics, leakage_metrics, share_metrics

__all__ = [
    "PART",
    "SHARE",
    "TERMS",
    "Divisor",
    "ObjectiveTerms",
    "TeacherLoss",
    "TeacherLosses",
    "TermName",
    "TokenScore",
    "apply_teacher_weights",
    "build_parts",
    "coverage_metrics",
    "gap",
    "joined_scores",
    "kd_of",
    "leakage_metrics",
    "mean_logprob",
    "nats_by_score",
    "sequence_scores",
    "share_metrics",
    "token_nats",
    "weighted_by_confidence",
]
