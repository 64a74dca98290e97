"""Teachers whose tokenizer differs from the student's in a special token are compared on the common tokens.

The student has `<|image|>`, which one teacher lacks, and the other teacher has one more token.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_opd.config.run import from_dict
from nemo_opd.preflight.plan import preflight
from tests.tiny import SENTENCES, Tiny, save_model
from tests.workers.local import Trained, Training, first_batches, in_world, plan_of, train

pytestmark = pytest.mark.world

JOBS = {
    "weighted_sum": [],
    "averaged_logits": ["aggregation=averaged_logits"],
    "averaged_logits, logits": ["aggregation=averaged_logits", "handoff=logits"],
    "weighted_sum, logits": ["handoff=logits"],
    "tcad": ["teachers.0.loss={type: tcad, support_size: 7}", "teachers.1.loss={type: tcad, support_size: 7}"],
    "chosen": ["aggregation=select_teacher"],
}
ON_TWO_RANKS = ("averaged_logits", "weighted_sum, logits", "tcad")
TEXTS = [SENTENCES[0], f"see <|image|>{SENTENCES[1]}", f"{SENTENCES[2]}<|image|> and <|image|>", SENTENCES[3]]


def overrides(tiny: Tiny, folder: Path) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(tiny.student)
    fewer = save_model(folder / "fewer", tokenizer, width=16, seed=4)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    student = save_model(folder / "student", tokenizer, width=16, seed=5)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>", "<|sound|>"]})
    more = save_model(folder / "more", tokenizer, width=24, seed=6)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return [
        *tiny.overrides(),
        f"student.model={student}",
        "loss=same_vocab",
        *(
            f"teachers.0.{key}"
            for key in (f"model={fewer}", "type=same_tokenizer", "name=fewer", "dtype=float32", "weight=0.5")
        ),
        *(f"teachers.1.{key}" for key in (f"model={more}", "name=more", "dtype=float32", "weight=0.5")),
        "data.train.arrow_files=null",
        f"data.train.jsonl_files={folder / 'texts.jsonl'}",
        "data.validation.arrow_files=null",
        "data.shuffle=false",
        "student.optimizer.eps=1e-3",
    ]


@pytest.fixture(scope="module")
def jobs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Training]:
    common_overrides = overrides(tiny, tmp_path_factory.mktemp("models"))
    jobs = {}
    for name, options in JOBS.items():
        plan = plan_of([*common_overrides, *options])
        jobs[name] = Training(plan, first_batches(plan, 1))
    return jobs


@pytest.fixture(scope="module")
def trained(jobs: dict[str, Training], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    results = in_world(1, train, list(jobs.values()), tmp_path_factory.mktemp("world") / "one")
    return dict(zip(jobs, results, strict=True))


def test_teachers_get_only_ids_of_their_vocabulary(jobs: dict[str, Training]) -> None:
    """Bugs: a lookup beyond the embeddings; tokens that only one of the averaged teachers scores."""
    for name, job in jobs.items():
        (batch,) = job.batches
        image = job.plan.student_vocab_size - 1
        is_image = batch.student.ids == image
        assert is_image.sum() == 3
        assert batch.student.loss_mask[is_image].all(), "cross-entropy learns it"
        fewer, more = batch.teachers
        assert fewer.tokens.ids.max() < job.plan.teachers[0].vocab_size == image
        assert not fewer.tokens.loss_mask[is_image].any()
        assert torch.equal(more.tokens.loss_mask[is_image], torch.full((3,), "averaged" not in name))


@pytest.mark.parametrize("name", ["weighted_sum", "weighted_sum, logits"])
def test_each_teacher_is_compared_on_the_common_tokens(
    jobs: dict[str, Training], trained: dict[str, Trained], name: str
) -> None:
    """CE has the student's full vocabulary. Tolerance: fp32 sums of 400 numbers."""
    (batch,), (metrics,) = jobs[name].batches, trained[name].curve
    student, fewer, more = read(jobs[name])
    ids, masks = batch.student.ids, [batch.student.loss_mask, *(rows.tokens.loss_mask for rows in batch.teachers)]
    size = fewer.shape[2]
    assert metrics["kd/fewer"] == pytest.approx(divergence(fewer, student[..., :size], masks[1]), rel=1e-5)
    assert metrics["kd/more"] == pytest.approx(divergence(more[..., : size + 1], student, masks[2]), rel=1e-5)
    log_p = student[:, :-1].log_softmax(2).gather(2, ids[:, 1:, None]).squeeze(2)
    assert metrics["ce"] == pytest.approx(float(-log_p[masks[0][:, 1:]].mean()), rel=1e-5)
    scored = int(masks[0].sum())
    assert metrics["kd_coverage/fewer"] == (scored - 3) / scored
    assert metrics["kd_coverage/more"] == 1


@pytest.mark.parametrize("name", ["averaged_logits", "averaged_logits, logits"])
def test_averaged_logits_have_the_common_tokens(
    jobs: dict[str, Training], trained: dict[str, Trained], name: str
) -> None:
    (batch,), (metrics,) = jobs[name].batches, trained[name].curve
    student, fewer, more = read(jobs[name])
    size, mask = fewer.shape[2], batch.teachers[0].tokens.loss_mask
    mean = (fewer + more[..., :size]) / 2
    assert metrics["kd"] == pytest.approx(divergence(mean, student[..., :size], mask), rel=1e-5)
    assert metrics["kd_coverage/fewer"] == metrics["kd_coverage/more"] < 1


@pytest.mark.parametrize("name", ["tcad", "chosen"])
def test_other_losses_and_aggregations_train(trained: dict[str, Trained], name: str) -> None:
    (metrics,) = trained[name].curve
    assert sum(value for key, value in metrics.items() if key.startswith("kd/")) > 0
    assert metrics["grad_norm"] > 0


def test_columns_on_two_ranks(
    jobs: dict[str, Training], trained: dict[str, Trained], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bug: heads of three sizes are assumed to be cut at the same columns. Tolerance as in test_layouts."""
    laid_out = []
    for name in ON_TWO_RANKS:
        config = jobs[name].plan.config.model_dump()
        for model in (config["student"], *config["teachers"]):
            model["parallelism"]["tp"] = 2
        config["cluster"]["cpu_ranks"] = 2
        laid_out.append(Training(preflight(from_dict(config)), jobs[name].batches))
    results = in_world(2, train, laid_out, tmp_path_factory.mktemp("world") / "two")
    for name, two_ranks in zip(ON_TWO_RANKS, results, strict=True):
        for key in ("ce", "grad_norm", *(key for key in two_ranks.curve[0] if key.startswith("kd"))):
            assert two_ranks.curve[0][key] == pytest.approx(trained[name].curve[0][key], rel=2e-5), (name, key)


def read(job: Training) -> list[Tensor]:
    """Return the float64 logits of student and teachers, each for its own ids."""
    (batch,) = job.batches
    sides = [(job.plan.config.student.model, batch.student)]
    sides += [
        (teacher.model, rows.tokens) for teacher, rows in zip(job.plan.config.teachers, batch.teachers, strict=True)
    ]
    with torch.no_grad():
        return [AutoModelForCausalLM.from_pretrained(model).double()(rows.ids).logits for model, rows in sides]


def divergence(teacher: Tensor, student: Tensor, mask: Tensor) -> float:
    """Return the mean forward KL over the tokens in the mask."""
    token_kl = F.kl_div(student.log_softmax(2), teacher.log_softmax(2), reduction="none", log_target=True).sum(2)
    return float(token_kl[:, :-1][mask[:, 1:]].mean())
