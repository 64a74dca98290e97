"""Warnings about the first step's distillation loss: teachers that agree too well with the student, or not at all."""

import math
from collections.abc import Iterator, Mapping

import torch

from nemo_opd.config.loss import (
    ALMTerm,
    BytePrefixTerm,
    ChunkTerm,
    FunctionTerm,
    LossTerm,
    PKLTerm,
    SameVocabTerm,
    SharedPrefixTerm,
    StrictTerm,
    TCADTerm,
)
from nemo_opd.config.run import RunConfig
from nemo_opd.models.load import compute_dtype

_LOGIT = 16.0
"""Assumed magnitude of a logit; rounding it makes equal models differ."""
_ROUNDING = 1e-6
"""Error of computing a divergence in fp32, in nats."""
_FORWARD_KLS = (SameVocabTerm, TCADTerm, PKLTerm, StrictTerm, BytePrefixTerm, SharedPrefixTerm)
"""Terms whose forward KL is a KL(teacher ‖ student) on cells: at most log(vocab_size) for a student with equal
probabilities for all tokens.
"""


def first_kd_warnings(config: RunConfig, vocab_size: int, device: str, record: Mapping[str, float]) -> Iterator[str]:
    """Yield a warning for each teacher whose KD at the first step is about 0 or above log(vocab_size) nats per unit.

    record: metrics of the step, computed before its update. No warning about agreement for a teacher with the student's
    weights or model.
    """
    for i, teacher in enumerate(config.active_teachers):
        name, term = f"train/kd/{teacher.name}", config.term(i)
        kd = record.get(name, math.nan) / getattr(term, "temperature", 1.0) ** 2
        if _is_about_0(kd, term, _noise(config, i, device)) and _differs(config, i):
            yield (
                f"{name} is {kd:.1g}: {teacher.name} and the student agree up to rounding, although "
                f"teachers.{i}.model={teacher.model} and student.model={config.student.model} differ. Either one is a "
                "copy of the other, so the student cannot learn from it, or the loss compares very few tokens: see "
                f"train/kd_coverage/{teacher.name} and the settings that restrict the comparison"
            )
        if math.log(vocab_size) < kd < math.inf and _is_forward_kl(term):
            yield (
                f"{name} is {kd:.3g} nats, but a student with equal probabilities for all {vocab_size} tokens has at "
                f"most {math.log(vocab_size):.3g}. Likely causes: {teacher.name} reads texts in another format than in "
                f"its training (teachers.{i}.chat_template, special tokens at the beginning), its tokenizer does not "
                f"match its model (teachers.{i}.tokenizer), or its weights are damaged or overflow in their dtype"
            )


def _noise(config: RunConfig, i: int, device: str) -> float:
    """Return the KL in nats between two roundings of the same logits, in the coarser dtype of student and teacher.

    It is half the variance of a logit's error, ulp² / 12. A cached or served teacher counts as bfloat16.
    """
    teacher = config.active_teachers[i]
    names = (config.student.dtype, teacher.dtype if teacher.is_computed else "bfloat16")
    eps = max(torch.finfo(compute_dtype(name, device)).eps for name in names)
    return max(_ROUNDING, (_LOGIT * eps) ** 2 / 24)


def _differs(config: RunConfig, i: int) -> bool:
    teacher = config.active_teachers[i]
    return not teacher.is_student and teacher.model != config.student.model


def _is_about_0(kd: float, term: LossTerm, noise: float) -> bool:
    """Return whether the models agree. Only a divergence in nats is compared with the noise; others must be 0."""
    if isinstance(term, ALMTerm | FunctionTerm):  # not 0 for equal models
        return False
    return abs(kd) <= (noise if isinstance(term, _FORWARD_KLS) else 0)


def _is_forward_kl(term: LossTerm) -> bool:
    if not isinstance(term, _FORWARD_KLS) or term.divergence != "forward_kl":
        return False
    has_coin = isinstance(term, ChunkTerm) and term.continuation_weight > 0  # spans several tokens, so unbounded
    weighs_coverage = isinstance(term, TCADTerm | PKLTerm) and (term.coverage_coef or 0) > 1
    return not has_coin and not weighs_coverage
