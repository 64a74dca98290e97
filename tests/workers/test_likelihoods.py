"""Likelihoods and greedy continuations of a run's workers equal transformers' results."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_opd.evaluation.likelihoods import Scored
from nemo_opd.preflight.plan import Plan
from tests.tiny import Tiny
from tests.workers.local import in_world, opened, plan_of

pytestmark = pytest.mark.world
LAYOUTS = {
    "data parallel": ("student.parallelism.reshard_after_forward=true",),
    "tensor parallel": ("student.parallelism.tp=2", "teachers.0.parallelism.tp=2", "teachers.1.parallelism.tp=2"),
}
_SMALLEST_VOCABULARY, _NUM_NEW = 340, 5
Likelihoods = list[tuple[float, bool]]


@dataclass(frozen=True)
class Asked:
    plan: Plan
    rows: list[Scored]


def ask(job: Asked) -> list[Likelihoods]:
    """Return the likelihoods of the rows for the student and each teacher."""
    with opened(job.plan) as models:
        return [models.likelihoods(job.rows, i) for i in (None, 0, 1)]


@dataclass(frozen=True)
class Continued:
    plan: Plan
    prompts: list[NDArray[np.int32]]


def continue_prompts(job: Continued) -> list[list[int]]:
    with opened(job.plan) as models:
        return models.continue_greedily(job.prompts, _NUM_NEW)


@pytest.fixture(scope="module")
def rows() -> list[Scored]:
    """Return seven sequences, a number that two ranks do not divide; some are longer than a batch."""
    random = np.random.default_rng(0)
    lengths = [2, 9, 70, 31, 5, 5, 130]
    return [
        Scored(random.integers(_SMALLEST_VOCABULARY, size=length).astype(np.int32), int(random.integers(1, length)))
        for length in lengths
    ]


@pytest.fixture(scope="module")
def likelihoods(
    tiny: Tiny, rows: list[Scored], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Likelihoods]]:
    jobs = [Asked(plan_of(tiny.overrides("cluster.cpu_ranks=2", *options)), rows) for options in LAYOUTS.values()]
    return dict(zip(LAYOUTS, in_world(2, ask, jobs, tmp_path_factory.mktemp("likelihoods") / "two"), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_likelihoods_equal_those_of_transformers(
    tiny: Tiny, rows: list[Scored], likelihoods: dict[str, list[Likelihoods]], layout: str
) -> None:
    """Bugs: another sequence, padding or half a vocabulary is read; the student answers for a teacher."""
    for folder, answers in zip((tiny.student, tiny.teacher_cross, tiny.teacher_same), likelihoods[layout], strict=True):
        model = _model(folder)
        for row, (value, is_likeliest) in zip(rows, answers, strict=True):
            expected, expected_is_likeliest = likelihood(model, row)
            assert value == pytest.approx(expected, rel=1e-5, abs=1e-4)
            assert is_likeliest == expected_is_likeliest


@torch.no_grad()
def likelihood(model: PreTrainedModel, row: Scored) -> tuple[float, bool]:
    ids = torch.from_numpy(row.ids).long()
    log_p = model(ids[None]).logits[0, :-1].double().log_softmax(-1)[-row.num_scored :]
    scored = ids[-row.num_scored :]
    return float(log_p.gather(1, scored[:, None]).sum()), bool((log_p.argmax(1) == scored).all())


def test_every_layout_continues_as_transformers(tiny: Tiny, rows: list[Scored], tmp_path: Path) -> None:
    """Bugs: tokens of one rank's part of the vocabulary; a deadlock of ranks."""
    prompts = [row.ids for row in rows[:4]]
    jobs = [
        Continued(plan_of(tiny.overrides("cluster.cpu_ranks=2", *options)), prompts) for options in LAYOUTS.values()
    ]
    model = _model(tiny.student)
    expected = [
        model.generate(torch.from_numpy(ids).long()[None], max_new_tokens=_NUM_NEW, eos_token_id=None, do_sample=False)[
            0, len(ids) :
        ].tolist()
        for ids in prompts
    ]
    assert in_world(2, continue_prompts, jobs, tmp_path / "two") == [expected] * len(LAYOUTS)


def _model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
