"""Warnings about the distillation loss of the first step: teachers that agree too well, or not at all."""

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
"""Magnitude of a logit, whose rounding makes equal models differ."""
_ROUNDING = 1e-6
"""Error of a divergence that is computed in fp32 itself, in nats."""
_FORWARD_KLS = (SameVocabTerm, TCADTerm, PKLTerm, StrictTerm, BytePrefixTerm, SharedPrefixTerm)
"""Terms whose value with forward KL is a KL(teacher ‖ student) on cells, so that equal probabilities of all tokens
have log of the vocabulary at most.
"""


def first_kd_warnings(config: RunConfig, vocab_size: int, device: str, record: Mapping[str, float]) -> Iterator[str]:
    """Yield a warning for each teacher whose KD at the first step is about 0 or above log(vocab_size), in nats a unit.

    record: metrics of the step, computed before its update. A teacher with the student's weights, or of the same model,
    agrees as it should.
    """
    for i, teacher in enumerate(config.active_teachers):
        name, term = f"train/kd/{teacher.name}", config.term(i)
        kd = record.get(name, math.nan) / getattr(term, "temperature", 1.0) ** 2
        if _is_about_0(kd, term, _noise(config, i, device)) and _differs(config, i):
            yield (
                f"{name} is {kd:.1g}: {teacher.name} and the student agree up to rounding, although "
                f"teachers.{i}.model={teacher.model} and student.model={config.student.model} differ. Either one is a "
                "copy of the other, so there is nothing to learn, or the loss compares next to nothing: see "
                f"train/kd_coverage/{teacher.name}, and the settings that cut what is compared"
            )
        if math.log(vocab_size) < kd < math.inf and _is_forward_kl(term):
            yield (
                f"{name} is {kd:.3g} nats, and a student that finds all {vocab_size} tokens equally likely has "
                f"{math.log(vocab_size):.3g} at most. Likely {teacher.name} reads other texts than it was trained on "
                f"(teachers.{i}.chat_template, special tokens at the beginning), its tokenizer is not its model's "
                f"(teachers.{i}.tokenizer), or its weights are damaged or overflow in their dtype"
            )


def _noise(config: RunConfig, i: int, device: str) -> float:
    """Return the KL in nats between logits of one model that are rounded twice, in the coarser dtype of both sides.

    It is half the variance of a logit's error, ulp² / 12. The dtype of a cached or served teacher is taken as bfloat16.
    """
    teacher = config.active_teachers[i]
    names = (config.student.dtype, teacher.dtype if teacher.is_computed else "bfloat16")
    eps = max(torch.finfo(compute_dtype(name, device)).eps for name in names)
    return max(_ROUNDING, (_LOGIT * eps) ** 2 / 24)


def _differs(config: RunConfig, i: int) -> bool:
    teacher = config.active_teachers[i]
    return not teacher.is_student and teacher.model != config.student.model


def _is_about_0(kd: float, term: LossTerm, noise: float) -> bool:
    """Return whether a value says that the models agree. Only a divergence in nats can be compared with the noise."""
    if isinstance(term, ALMTerm | FunctionTerm):  # not 0 for models that agree
        return False
    return abs(kd) <= (noise if isinstance(term, _FORWARD_KLS) else 0)


def _is_forward_kl(term: LossTerm) -> bool:
    if not isinstance(term, _FORWARD_KLS) or term.divergence != "forward_kl":
        return False
    has_coin = isinstance(term, ChunkTerm) and term.continuation_weight > 0  # of several tokens, so without a bound
    weighs_coverage = isinstance(term, TCADTerm | PKLTerm) and (term.coverage_coef or 0) > 1
    return not has_coin and not weighs_coverage
