"""Combination of several teachers' losses into one objective (methods.md §6)."""

from nemo_opd.aggregation.objective import (
    PART,
    SHARE,
    TERMS,
    Divisor,
    TeacherLoss,
    TermName,
    TrainingObjective,
    build_objective,
    coverage_metrics,
    kd_of,
    leakage_metrics,
    share_metrics,
)
from nemo_opd.aggregation.rules import apply_teacher_weights, weighted_by_confidence
from nemo_opd.aggregation.scores import (
    TokenScore,
    gap,
    joined_scores,
    mean_logprob,
    nats_by_score,
    sequence_scores,
    token_nats,
)

__all__ = [
    "PART",
    "SHARE",
    "TERMS",
    "Divisor",
    "TeacherLoss",
    "TermName",
    "TokenScore",
    "TrainingObjective",
    "apply_teacher_weights",
    "build_objective",
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
