"""Likelihoods from a run's workers that differ from those of a model in one process."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_opd.evaluation.likelihoods import Scored
from nemo_opd.preflight.plan import Plan
from tests.evaluation.scorer import model_scorer
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
    """Return what the student finds of the rows, and each teacher."""
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
    """Return sequences of many lengths, which no number of ranks divides; some are longer than a batch."""
    random = np.random.default_rng(0)
    lengths = [2, 9, 70, 31, 5, 5, 130]
    return [
        Scored(random.integers(_SMALLEST_VOCABULARY, size=length).astype(np.int32), int(random.integers(1, length)))
        for length in lengths
    ]


@pytest.fixture(scope="module")
def found(tiny: Tiny, rows: list[Scored], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Likelihoods]]:
    jobs = [Asked(plan_of(tiny.overrides("cluster.cpu_ranks=2", *options)), rows) for options in LAYOUTS.values()]
    return dict(zip(LAYOUTS, in_world(2, ask, jobs, tmp_path_factory.mktemp("likelihoods") / "two"), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_finds_what_one_model_finds(
    tiny: Tiny, rows: list[Scored], found: dict[str, list[Likelihoods]], layout: str
) -> None:
    """Bug: answers of another sequence, of padding, or of half a vocabulary; the student's in place of a teacher's."""
    for folder, answers in zip((tiny.student, tiny.teacher_cross, tiny.teacher_same), found[layout], strict=True):
        expected = model_scorer(_model(folder), "cpu")(rows)
        assert [is_likeliest for _, is_likeliest in answers] == [is_likeliest for _, is_likeliest in expected]
        values, wanted = (torch.tensor([value for value, _ in side]) for side in (answers, expected))
        torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-4)


def test_every_layout_continues_as_transformers(tiny: Tiny, rows: list[Scored], tmp_path: Path) -> None:
    """Bug: tokens of a rank's share of the vocabulary or ranks that wait for one another."""
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


@torch.no_grad()
def test_one_model_finds_what_transformers_finds(tiny: Tiny, rows: list[Scored]) -> None:
    model = _model(tiny.student)
    for row, (value, is_likeliest) in zip(rows, model_scorer(model, "cpu")(rows), strict=True):
        ids = torch.from_numpy(row.ids).long()
        log_p = model(ids[None]).logits[0, :-1].double().log_softmax(-1)[-row.num_scored :]
        scored = ids[-row.num_scored :]
        assert value == pytest.approx(float(log_p.gather(1, scored[:, None]).sum()), rel=1e-5)
        assert is_likeliest == bool((log_p.argmax(1) == scored).all())


def _model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
