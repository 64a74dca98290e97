"""A step on sampled sequences is the same for all cuts of a batch (methods.md §7.1 and §10)."""

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_opd.config.rollout import HFRollout
from nemo_opd.data.collate import collate
from nemo_opd.data.record import Prompt, Rollout
from nemo_opd.rollout import hf
from nemo_opd.rollout.base import EngineSpec, Sampling
from nemo_opd.rollout.collect import Collector
from nemo_opd.training.plan import Plan
from nemo_opd.training.prompts import Prompts
from nemo_opd.training.rollout_source import with_rollouts
from nemo_opd.types import Batch, ChunkRows, SampledRows, TeacherRows, TokenRows
from tests.tiny import Tiny
from tests.workers.local import RTOL, WEIGHT_ATOL, Trained, Training, in_world, plan_of, train

pytestmark = pytest.mark.world

QUESTIONS = ["12+34=", "for i in", "Größe", "привет"]
N = 2
BOTH = ["teachers=demo_multi", "loss=p_kl", "loss.ce_weight=0.5"]
LOSSES = {
    "tcad": [*BOTH, "teachers.1.loss.type=tcad", "teachers.1.loss.support_size=8", "teachers.1.loss.power_alpha=0.3"],
    "reward": [*BOTH, "reward.weighting_beta=0.7"],
    "sampled_kl": ["teachers=demo_multi", "loss=policy_gradient", "loss.ce_weight=0.5"],
    "sampled_kl, warped": [
        "teachers=demo_multi",
        "loss=policy_gradient",
        "loss.ce_weight=0.5",
        "rollout.temperature=0.6",
        "rollout.top_p=0.9",
    ],
    "sampled_kl, sequences": [
        "teachers=demo_multi",
        "loss=policy_gradient",
        "loss.ce_weight=0.5",
        "loss.importance_level=sequence",
        "loss.importance_cap=1.5",
        "loss.importance_veto=0.1",
    ],
    "grpo": [
        "teachers=demo_multi",
        "loss=grpo",
        "loss.kd_weight=0.3",
        "teachers.0.loss.type=strict",
        "loss.clip_low=0.02",
        "loss.importance_cap=1.05",
        "loss.importance_veto=0.05",
    ],
}
GRIDS = ((1, 4), (1, 1), (2, 2))
"""Numbers of ranks and microbatch sizes."""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("on_policy") / "prompts.jsonl"
    rows = [{"text": text, "response": f" {i} done", "answer": str(i)} for i, text in enumerate(QUESTIONS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def plan(tiny: Tiny, prompts: Path, *overrides: str) -> Plan:
    models = [f"teachers.0.model={tiny.teacher_cross}", f"teachers.1.model={tiny.teacher_same}"]
    return plan_of(
        [
            "student=demo",
            *overrides,
            *(models if "teachers=demo_multi" in overrides else []),
            f"student.model={tiny.student}",
            "data.train.arrow_files=null",
            f"data.train.jsonl_files={prompts}",
            "data.shuffle=false",
            "evaluation=null",
            "train.global_batch_size=8",
            "train.micro_batch_size=4",
            "train.max_length=40",
            "train.max_steps=2",
            f"rollout.n={N}",
            "rollout.max_new_tokens=12",
            "student.optimizer.lr=1e-2",
            "student.optimizer.eps=1e-3",
            "student.scheduler.warmup_steps=0",
        ],
        config_name="on_policy_demo",
    )


def batch_of(plan: Plan, seed: int) -> Batch:
    """Return random responses of different lengths to three prompts, and the dataset's response to the fourth."""
    data, config = plan.data, plan.config
    assert isinstance(data, Prompts)
    *own, other = data.train.all()
    random = np.random.default_rng(seed)
    end = min(data.student.end_ids)
    if config.rollout is not None and config.rollout.top_p < 1:
        rollouts = sampled_rollouts(plan, own, seed)
    else:
        rollouts = [rollout_of(prompt, sample, data, random, end) for prompt in own for sample in range(N)]
    rewards = random.integers(0, 2, len(rollouts)).astype(float).tolist()
    samples = [data.make_sample(each) for each in (*rollouts, data.from_dataset(other))]
    return with_rollouts(collate(samples), rollouts, [other], rewards, config)


def sampled_rollouts(plan: Plan, prompts: list[Prompt], seed: int) -> list[Rollout]:
    """Sample with the initial student and the run's settings."""
    settings, data = plan.config.rollout, plan.data
    assert settings is not None
    assert isinstance(data, Prompts)
    spec = EngineSpec(plan.student_vocab_size, data.student.end_ids, "float32", Path())
    sampling = Sampling(settings.temperature, settings.top_p, settings.top_k)
    with hf.for_model(HFRollout(batch_size=8), spec, plan.config.student.model, "cpu") as engine:
        collector = Collector(
            engine, data.student.renderer, sampling=sampling, max_new_tokens=11, max_length=40, seed=seed
        )
        return collector.collect(prompts, N, 0)


def rollout_of(prompt: Prompt, sample: int, data: Prompts, random: np.random.Generator, end: int) -> Rollout:
    asked = data.student.renderer.prompt_ids(prompt)
    said = random.integers(1, 300, random.integers(1, 11)).astype(np.int32)
    said = np.append(said[said != end], np.int32(end))
    ids = np.concatenate([asked, said])
    mask = np.arange(len(ids)) >= len(asked)
    logprobs = np.where(mask, random.normal(-6, 0.5, len(ids)), 0).astype(np.float32)
    behaviour = np.where(mask, logprobs + random.normal(0.5, 0.3, len(ids)), 0).astype(np.float32)
    turns = np.array([[len(asked), len(ids)]], np.int32)
    responses = (data.student.renderer.text(said[:-1]),)
    return Rollout(prompt, sample, ids, mask, logprobs, behaviour, turns, responses, (), "stop", 0)


@pytest.fixture(scope="module")
def trained(tiny: Tiny, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trained]]:
    """Return results by loss on every grid, and on the first one with the rows in another order."""
    plans = {name: plan(tiny, prompts, *overrides) for name, overrides in LOSSES.items()}
    batches = {name: [batch_of(own, seed) for seed in range(2)] for name, own in plans.items()}
    found: dict[str, list[Trained]] = {name: [] for name in LOSSES}
    for ranks, micro in GRIDS:
        jobs = [Training(with_micro(plans[name], micro), batches[name]) for name in LOSSES]
        folder = tmp_path_factory.mktemp("world") / f"{ranks}_{micro}"
        for name, made in zip(LOSSES, in_world(ranks, train, jobs, folder), strict=True):
            found[name].append(made)
    order = torch.tensor([4, 1, 6, 0, 3, 5, 2])
    jobs = [Training(plans[name], [in_order(each, order) for each in batches[name]]) for name in LOSSES]
    for name, made in zip(LOSSES, in_world(1, train, jobs, Path()), strict=True):
        found[name].append(made)
    return found


def with_micro(plan: Plan, size: int) -> Plan:
    train = plan.config.train.model_copy(update={"micro_batch_size": size})
    return replace(plan, config=plan.config.model_copy(update={"train": train}))


def in_order(batch: Batch, order: torch.Tensor) -> Batch:
    def of_tokens(rows: TokenRows) -> TokenRows:
        return TokenRows(rows.ids[order], rows.lengths[order], rows.loss_mask[order], rows.num_bytes[order])

    def of_chunks(rows: ChunkRows) -> ChunkRows:
        assert rows.histories is not None
        return ChunkRows(rows.student[order], rows.teacher[order], rows.histories[order])

    def of_teacher(rows: TeacherRows) -> TeacherRows:
        chunks = None if rows.chunks is None else of_chunks(rows.chunks)
        weights = None if rows.rollout_weights is None else rows.rollout_weights[order]
        return TeacherRows(of_tokens(rows.tokens), chunks, None, weights)

    known = batch.sampled
    assert known is not None
    sampled = SampledRows(*(getattr(known, field.name)[order] for field in fields(known)))
    return Batch(of_tokens(batch.student), tuple(map(of_teacher, batch.teachers)), sampled)


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_depends_on_how_a_batch_is_cut_or_ordered(trained: dict[str, list[Trained]], loss: str) -> None:
    first, *others = trained[loss]

    assert first.curve[0]["grad_norm"] > 1e-3
    for other in others:
        for own, same in zip(first.curve, other.curve, strict=True):
            learned = {name: value for name, value in own.items() if name != "peak_memory_gb"}
            assert learned == pytest.approx({name: same[name] for name in learned}, rel=RTOL, abs=1e-6)
        for name, weight in first.weights.items():
            torch.testing.assert_close(other.weights[name], weight, rtol=0, atol=WEIGHT_ATOL)


@pytest.mark.parametrize("loss", ["sampled_kl, sequences", "grpo"])
def test_some_weights_are_cut_and_some_sequences_dropped(trained: dict[str, list[Trained]], loss: str) -> None:
    """Otherwise the tests of invariance would test nothing."""
    found = trained[loss][0].curve[0]
    of = [name for name in found if name.startswith(("policy/truncated_fraction", "policy/vetoed_fraction"))]

    assert len(of) == (2 if loss == "grpo" else 4)
    assert all(0 < found[name] < 1 for name in of)


def test_warped_samples_weigh_more_than_one_and_are_not_clipped_at_first(trained: dict[str, list[Trained]]) -> None:
    """In the first step the student is the one that sampled: the ratio is 1, the weight is not."""
    found = trained["sampled_kl, warped"][0].curve[0]
    names = [name for name in found if name.startswith("policy/ratio")]

    assert len(names) == 2
    for name in names:
        assert found[name] == pytest.approx(1, abs=1e-4)
        assert found[name.replace("ratio", "clip_fraction")] == 0
        assert found[name.replace("ratio", "weight_max")] > 1.2


def test_losses_differ(trained: dict[str, list[Trained]]) -> None:
    """Catches a setting that reaches no loss."""
    norms = {loss: made[0].curve[0]["grad_norm"] for loss, made in trained.items()}

    assert len({round(norm, 5) for norm in norms.values()}) == len(LOSSES)


@pytest.mark.parametrize("loss", ["reverse_kl", "jsd", "tcad", "policy_gradient"])
def test_a_student_that_is_its_teacher_learns_nothing(tiny: Tiny, prompts: Path, loss: str) -> None:
    more = ["loss.coverage_coef=0"] if loss == "tcad" else []
    twin = plan(tiny, prompts, f"loss={loss}", *more, f"teachers.0.model={tiny.student}")
    batch = batch_of(twin, 0)
    assert batch.sampled is not None

    (made,) = in_world(1, train, [Training(twin, [batch])], Path())

    assert made.curve[0]["kd/same"] == pytest.approx(0, abs=1e-6)
    assert made.curve[0]["grad_norm"] == pytest.approx(0, abs=1e-6)
