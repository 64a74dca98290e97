"""Settings and projections that a loss rejects, by message."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nemo_opd.errors import ConfigError, ProjectionError
from nemo_opd.projection import ProjectionMatrix

from .cases import LOSSES, PHI, pair

NAMED = {case.name: case for case in LOSSES} | {case.loss.__name__: case for case in reversed(LOSSES)}
SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("p_kl", {"vocab_topk": 0}, "vocab_topk=0"),
    ("p_kl", {"merge": "last"}, "merge='last'.*choose from first, mean"),
    ("p_kl", {"merge": "observed"}, "merge=observed"),
    ("p_kl", {"compat": "trl"}, "compat='trl'.*choose from nemo_rl"),
    ("p_kl", {"compat": "nemo_rl", "merge": "first"}, "merge=first contradicts compat=nemo_rl, which uses mean"),
    (
        "p_kl",
        {"compat": "nemo_rl", "coverage_coef": 1.0},
        "coverage_coef=1.0 contradicts compat=nemo_rl, which uses 0.0",
    ),
    *((name, {"merge": "last"}, "merge='last'.*choose from first, mean") for name in ("gold", "h_kl")),
    *((name, {"uncommon_topk": 0}, "uncommon_topk=0") for name in ("gold", "h_kl")),
    ("gold", {"common_weight": -1.0}, "common_weight=-1.0"),
    ("gold", {"uncommon_weight": float("nan")}, "uncommon_weight=nan"),
    ("gold", {"compat": "verl"}, "compat='verl'.*nemo_rl, trl"),
    ("gold", {"compat": "trl", "merge": "mean"}, "merge=mean contradicts compat=trl, which uses observed"),
    ("strict", {"top_k": 0}, "top_k=0"),
    ("strict", {"normalization": "full"}, "normalization='full'.*choose from support, rest"),
    ("strict", {"continuation_weight": -1}, "continuation_weight=-1"),
    ("byte_prefix", {"positions": "some"}, "positions='some'.*choose from starts, all"),
    ("byte_prefix", {"pieces": "some"}, "pieces='some'.*choose from spelling, longest_prefix"),
    ("byte_prefix", {"positions": "all", "ends": "some"}, "ends='some'.*choose from drop, cover, rest"),
    (
        "byte_prefix",
        {"positions": "all", "divergence": "jsd"},
        "divergence=jsd.*choose divergence=forward_kl or ends=cover",
    ),
    (
        "byte_prefix",
        {"positions": "all", "continuation_weight": 0.5},
        "continuation_weight=0.5.*choose positions=starts",
    ),
    ("shared_prefix", {"pieces": "words"}, "pieces='words' is unknown"),
    ("escd", {"completion_weight": -1}, "completion_weight=-1"),
    ("same_vocab", {"student_vocab_size": 5, "teacher_vocab_size": 6}, "differ"),
    ("tcad", {"support": "full"}, "support='full'.*interleaved, union"),
    ("tcad", {"support_size": 0}, "support_size=0"),
    ("tcad", {"coverage_coef": -1.0}, "coverage_coef=-1.0"),
    ("sampled_kl", {"estimator": "k4"}, "estimator='k4'.*k1, k2, k3"),
    ("sampled_kl", {"update": "none"}, "update='none'"),
    ("sampled_kl", {"clip_low": 1.5}, "clip_low=1.5"),
    ("sampled_kl", {"clip_high": -0.1}, "clip_high=-0.1"),
    ("sampled_kl", {"dual_clip": 1.0}, "dual_clip=1.0"),
    *((name, {"logprobs": torch.zeros(1, 3)}, "logprobs has shape") for name in ("sampled_kl", "sampled_chunk_kl")),
    ("sampled_kl", {"behaviour_logprobs": torch.zeros(1, 3)}, "behaviour_logprobs has shape"),
    ("sampled_kl", {"importance_level": "chunk"}, "importance_level='chunk'.*token, sequence"),
    ("sampled_kl", {"importance_level": "sequence"}, "update='policy_gradient'"),
    ("sampled_kl", {"importance_cap": 0.0}, "importance_cap=0.0"),
    ("sampled_kl", {"importance_veto": 1.0}, "importance_veto=1.0"),
]


@pytest.mark.parametrize(("name", "settings", "message"), SETTINGS)
def test_a_setting_that_does_not_fit_is_named(name: str, settings: dict[str, Any], message: str) -> None:
    """Catches a biased target, or a setting that is accepted and has no effect."""
    case = NAMED[name]
    with pytest.raises(ConfigError, match=message):
        case.run(case.batch(), **settings)


def test_a_teacher_narrower_than_its_tokenizer_is_named() -> None:
    batch = NAMED["p_kl"].batch()
    with pytest.raises(ConfigError, match="teacher_vocab_size=11: the logits have 10"):
        NAMED["p_kl"].run(batch.with_logits(batch.student, batch.teacher[..., :10]))


def of_rows(indices: np.ndarray, weights: np.ndarray, **more: Any) -> ProjectionMatrix:
    return ProjectionMatrix(indices, weights, teacher_vocab_size=11, **more)


NOTHING = np.full((9, 1), -1), np.zeros((9, 1))
PROJECTIONS: list[tuple[str, dict[str, Any], ProjectionMatrix, str]] = [
    ("p_kl", {}, of_rows(*NOTHING), "no entry"),
    ("gold", {}, of_rows(pair().indices, pair().weights), "no matching tokens"),
    ("h_kl", {}, of_rows(np.array([[0, 1]] * 9), np.full((9, 2), 0.5)), "no matching tokens"),
    ("strict", {}, of_rows(*NOTHING), "no matching tokens within 9 student and 11 teacher"),
    ("byte_prefix", {"pieces": "longest_prefix"}, of_rows(*NOTHING), "add_byte_prefix"),
    (
        "byte_prefix",
        {"pieces": "longest_prefix"},
        of_rows(*NOTHING, byte_prefix=PHI),
        r"byte order .* nemo_opd\.projection\.add_byte_prefix",
    ),
    ("shared_prefix", {}, of_rows(*NOTHING), "add_shared_prefix"),
    (
        "shared_prefix",
        {},
        of_rows(*NOTHING, student_shared_prefix=[-1] * 9, teacher_shared_prefix=[-1] * 11),
        "no common cell within 9 student and 11 teacher",
    ),
    (
        "shared_prefix",
        {"pieces": "spelling"},
        replace(pair(), student_shared_spelling=None, teacher_shared_spelling=None),
        "pieces=spelling needs",
    ),
    ("escd", {}, of_rows(*NOTHING, byte_prefix=[0] * 11), "needs the bytes"),
]


@pytest.mark.parametrize(("name", "settings", "projection", "message"), PROJECTIONS)
def test_a_projection_that_lacks_something_is_named(
    name: str, settings: dict[str, Any], projection: ProjectionMatrix, message: str
) -> None:
    case = NAMED[name]
    with pytest.raises(ProjectionError, match=message):
        case.run(replace(case.batch(), projection=projection), **settings)
