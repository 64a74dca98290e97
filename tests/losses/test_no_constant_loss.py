"""Settings that validation accepts have a gradient between two different models."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from itertools import product
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from pydantic import ValidationError

from nemo_opd import losses
from nemo_opd.config.loss import FunctionTerm, LossTerm
from nemo_opd.config.settings import choices
from nemo_opd.errors import ConfigError
from nemo_opd.losses.term_loss import ACROSS_TOKENIZERS, LOSSES, NOT_ARGUMENTS

from . import cases

NUMBERS: dict[str, tuple[float | None, ...]] = {
    "temperature": (2.0,),
    "top_k": (None, 1, 2),
    "vocab_topk": (None, 1, 2),
    "uncommon_topk": (None, 1),
    "support_size": (1, 2, 256),
    "continuation_weight": (0.0, 0.5),
    "completion_weight": (0.0, 1.0),
    "coverage_coef": (None, 0.0, 1.0),
    "common_weight": (None, 0.0, 1.0),
    "uncommon_weight": (None, 0.0, 1.0),
    "power_alpha": (1.0,),
    "clip_low": (0.0,),
    "clip_high": (0.0,),
    "dual_clip": (None, 1.5),
    "advantage_clamp": (None, 0.5),
    "importance_cap": (None, 0.5),
    "importance_veto": (None, 0.5),
}
"""Values of numeric settings."""
DIVERGENCES = [
    *({"divergence": kind} for kind in ("forward_kl", "reverse_kl", "tvd")),
    *({"divergence": "jsd", "beta": beta} for beta in (0.0, 0.5, 1.0)),
    *({"divergence": "mixed", "mixed_weight": weight} for weight in (0.0, 0.5, 1.0)),
]
TERMS = [term for term in choices(LossTerm) if term is not FunctionTerm]


def values(name: str, annotation: Any) -> tuple[Any, ...]:
    """Return all values of a choice, or some of a number."""
    if name in NUMBERS:
        return NUMBERS[name]
    branches = [annotation] if get_origin(annotation) is Literal else get_args(annotation)
    return tuple(value for branch in branches for value in get_args(branch) or (None,))


def accepted(term: Any) -> Iterator[Any]:
    """Yield a term for each combination of settings that validation accepts, with a random divergence."""
    pick = random.Random(0)
    divergence_fields = {"divergence", "beta", "mixed_weight"} & term.model_fields.keys()
    fields = {
        name: field for name, field in term.model_fields.items() if name != "type" and name not in divergence_fields
    }
    choices_of_fields = [values(name, field.annotation) for name, field in fields.items()]
    for drawn in product(*choices_of_fields):
        settings = dict(zip(fields, drawn, strict=True))
        with contextlib.suppress(ValidationError):
            yield term(**settings, **(pick.choice(DIVERGENCES) if divergence_fields else {}))


@pytest.mark.parametrize("across_tokenizers", [False, True])
@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.model_fields["type"].default)
def test_every_accepted_setting_has_a_gradient(term: Any, across_tokenizers: bool) -> None:
    """Catches settings that make a loss constant, so a run trains nothing and does not say so."""
    kind = term.model_fields["type"].default
    loss = (ACROSS_TOKENIZERS if across_tokenizers else LOSSES)[kind].loss
    if across_tokenizers and loss is LOSSES[kind].loss:
        pytest.skip("it has one form for both kinds of teachers")
    case = next(case for case in cases.LOSSES if case.loss is loss)
    # At scale 1.0 no softmax is so sharp that its gradient is lost. The batch has all kinds of chunks.
    batch, constant, num_accepted = case.batch(scale=1.0), [], 0
    student = batch.student.requires_grad_()
    for settings in accepted(term):
        value = loss(student, batch.teacher, **case.arguments(batch), **settings.model_dump(exclude=NOT_ARGUMENTS)).loss
        (gradient,) = torch.autograd.grad(value, student)
        num_accepted += 1
        if not gradient.abs().max() > 1e-6:
            constant.append(settings)
    assert num_accepted
    assert not constant


CHUNKS = ("student_ids", "teacher_ids", "student_chunk_id", "teacher_chunk_id")
CONSTANT: list[tuple[str, dict[str, Any], str]] = [
    ("same_vocab", {"support": "student_topk", "top_k": 1, "normalization": "support"}, "top_k"),
    ("same_vocab", {"support": "teacher_topk", "top_k": 1, "normalization": "support"}, "top_k"),
    ("strict", {"top_k": 1}, "top_k"),
    ("tcad", {"support_size": 1, "coverage_coef": 0.0}, "support_size"),
    ("p_kl", {"compat": "nemo_rl", "vocab_topk": 1}, "vocab_topk"),
    ("gold", {"common_weight": 0.0, "uncommon_weight": 0.0}, "common_weight"),
    ("h_kl", {"common_weight": 0.0, "uncommon_weight": 0.0}, "common_weight"),
]


@pytest.mark.parametrize(("name", "settings", "key"), CONSTANT)
def test_a_constant_loss_is_refused_in_yaml_and_in_python(name: str, settings: dict[str, Any], key: str) -> None:
    """Catches a constant loss that YAML or Python accepts, or a message without the key and the remedy."""
    term = next(term for term in TERMS if term.model_fields["type"].default == name)
    with pytest.raises(ValidationError, match=rf"{key}.*(\n.*)?constant; raise"):
        term(**settings)
    case = next(case for case in cases.LOSSES if case.loss is getattr(losses, name))
    with pytest.raises(ConfigError, match=rf"{key}=[01].*nothing is learned"):
        case.loss((batch := case.batch()).student, batch.teacher, **case.arguments(batch), **settings)
