"""A student with trained adapters equals one with weights W + alpha / rank · B A.

Tolerances as derived in tests/workers/test_invariance.py.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from nemo_opd.config.cluster import LogitsHandoff
from nemo_opd.config.model import Lora
from nemo_opd.distributed.collectives import gathered
from nemo_opd.preflight.plan import Plan
from nemo_opd.types import Batch
from nemo_opd.workers.student_worker import StudentWorker
from tests.reference import trainer
from tests.tiny import Tiny
from tests.workers.local import (
    RTOL,
    WEIGHT_ATOL,
    Training,
    first_batches,
    in_world,
    on_ranks_of,
    opened,
    plan_of,
    train_step,
    weights,
)
from tests.workers.plain_trainer import plain_training

pytestmark = pytest.mark.world

STEPS = 4
RANK, ALPHA = 3, 12
IDS = torch.arange(24).view(2, 12)


@dataclass(frozen=True)
class Learned:
    curve: list[dict[str, float]]
    start: dict[str, Tensor]
    """Adapters before training."""
    adapters: dict[str, Tensor]
    frozen: dict[str, Tensor]
    logits: Tensor
    """Logits of the trained model for IDS."""
    optimized: int
    """Number of first moments of the optimizer."""


def learn(job: Training) -> Learned:
    with opened(job.plan) as models:
        if job.load_from is not None:
            models.load(job.load_from)
        start = weights(models)
        curve = [train_step(models, batch, compare_gradients=job.compare_gradients) for batch in job.batches]
        if job.save_to is not None:
            models.save(job.save_to)
        if job.export_to is not None:
            models.export(job.export_to)
        return Learned(curve, start, weights(models), *on_ranks_of(models.student, inside)[0])


def inside(student: StudentWorker) -> tuple[dict[str, Tensor], Tensor, int]:
    """Return frozen parameters, logits, and the number of optimized parameters."""
    parameters: Any = dict(student.model.named_parameters())
    frozen = {name: gathered(parameter) for name, parameter in parameters.items() if not parameter.requires_grad}
    moments = [state["exp_avg"].numel() for state in student.optimizer.state.values()]
    with torch.no_grad():
        logits = student.model.eval()(input_ids=IDS, use_cache=False).logits
    return frozen, logits, sum(moments)


def make_plan(tiny: Tiny) -> Plan:
    return plan_of(
        tiny.overrides(
            f"train.max_steps={STEPS}",
            "student.optimizer.lr=1e-2",
            "student.optimizer.eps=1e-3",
            "student.scheduler.warmup_steps=0",
            f"student.lora={{rank:{RANK},alpha:{ALPHA}}}",
        )
    )


def changed(plan: Plan, **settings: object) -> Plan:
    """Change settings of the student without the slow checks."""
    return with_config(plan, student=plan.config.student.model_copy(update=settings))


def with_config(plan: Plan, **sections: object) -> Plan:
    return replace(plan, config=plan.config.model_copy(update=sections))


@dataclass(frozen=True)
class Runs:
    plan: Plan
    batches: list[Batch]
    alone: Learned
    resumed: Learned
    variants: dict[str, Learned]
    paired: Learned
    widened: Learned
    """Training continued on two ranks from the checkpoint of one."""
    folder: Path


VARIANTS = ("recomputed", "named", "logits", "gradients compared")
NAMES = ("q_proj", "o_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "mlp.down_proj")
"""All linear layers of a Llama."""


@pytest.fixture(scope="module")
def runs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("lora")
    plan = make_plan(tiny)
    adapter = changed(plan, lora=Lora(rank=RANK, alpha=ALPHA, export="adapter"))
    batches = first_batches(plan, STEPS)
    full_run = Training(plan, batches)
    first_half = Training(plan, batches[:2], save_to=folder / "checkpoint")
    second_half = Training(adapter, batches[2:], load_from=folder / "checkpoint", export_to=folder / "adapter")
    jobs = [replace(full_run, export_to=folder / "merged"), first_half, second_half]
    variants = [
        Training(changed(plan, activation_checkpointing=True), batches),
        Training(changed(plan, lora=Lora(rank=RANK, alpha=ALPHA, target_modules=NAMES)), batches),
        Training(with_config(plan, handoff=LogitsHandoff()), batches),
        replace(full_run, compare_gradients=True),
    ]
    alone, _, resumed, *variant_results = in_world(1, learn, [*jobs, *variants], folder / "one")
    paired, widened = in_world(2, learn, [full_run, replace(second_half, export_to=None)], folder / "two")
    return Runs(
        plan, batches, alone, resumed, dict(zip(VARIANTS, variant_results, strict=True)), paired, widened, folder
    )


Oracle = tuple[list[dict[str, float]], dict[str, Tensor]]
"""Curve and weights."""


class Sum(nn.Module):
    """The parametrization W → W + alpha / rank · B A."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a.double()), nn.Parameter(b.double())

    def forward(self, weight: Tensor) -> Tensor:
        return weight + ALPHA / RANK * self.b @ self.a


@pytest.fixture(scope="module")
def oracle(runs: Runs) -> Oracle:
    load = trainer.load

    def with_sums(path: str, nudge: float) -> PreTrainedModel:
        model = load(path, nudge)
        if path == runs.plan.config.student.model:
            model.requires_grad_(False)
            for name, a in runs.alone.start.items():
                if ".lora_A." in name:
                    target = model.get_submodule(name.partition(".lora_A.")[0])
                    b = runs.alone.start[name.replace(".lora_A.", ".lora_B.")]
                    parametrize.register_parametrization(target, "weight", Sum(a, b))
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "load", with_sums)
        return plain_training(runs.plan, runs.batches)


@pytest.mark.parametrize("ranks", [1, 2])
def test_curve_and_adapters_equal_plain_autograds(runs: Runs, oracle: Oracle, ranks: int) -> None:
    """Bugs: a wrong scale; ranks initialize adapters differently; weight decay or norm over frozen weights."""
    curve, weights = oracle
    learned = runs.alone if ranks == 1 else runs.paired
    for step, (expected, actual) in enumerate(zip(curve, learned.curve, strict=True)):
        for name, value in expected.items():
            assert actual[name] == pytest.approx(value, rel=RTOL), (step, name)
    for name, adapter in learned.adapters.items():
        assert torch.equal(learned.start[name], runs.alone.start[name])
        plain_name = name.replace(".lora_A.default.weight", ".parametrizations.weight.0.a")
        plain_name = plain_name.replace(".lora_B.default.weight", ".parametrizations.weight.0.b")
        assert (weights[plain_name] - learned.start[name]).abs().max() > 100 * WEIGHT_ATOL, f"{name} hardly moved"
        torch.testing.assert_close(adapter, weights[plain_name], rtol=RTOL, atol=WEIGHT_ATOL)


def test_dropout_is_drawn_from_the_seed(runs: Runs, tmp_path: Path) -> None:
    """Bug: each process seeds dropout by itself, so a run cannot be repeated."""
    plan = changed(runs.plan, lora=Lora(rank=RANK, alpha=ALPHA, dropout=0.5))
    first, again = in_world(1, learn, [Training(plan, runs.batches[:2])] * 2, tmp_path)
    assert first.curve == again.curve
    assert first.curve[0]["grad_norm"] != runs.alone.curve[0]["grad_norm"]


def test_the_base_does_not_change(runs: Runs) -> None:
    base = AutoModelForCausalLM.from_pretrained(runs.plan.config.student.model)
    stored = dict(base.named_parameters())
    for learned in (runs.alone, runs.paired, runs.resumed):
        assert len(learned.frozen) == len(stored)
        for name, value in learned.frozen.items():
            assert torch.equal(value, stored[name.replace(".base_layer", "")]), name


def test_the_optimizer_and_checkpoints_have_adapters_only(runs: Runs) -> None:
    assert runs.alone.optimized == sum(value.numel() for value in runs.alone.adapters.values())
    reader = FileSystemReader(runs.folder / "checkpoint" / "state")
    stored = reader.read_metadata().state_dict_metadata
    assert {name.removeprefix("model.") for name in stored if name.startswith("model.")} == set(runs.alone.adapters)
    assert all(".lora_" in name for name in stored if name.startswith("optimizer.state."))


def test_resumed_training_is_the_same_to_the_last_bit(runs: Runs) -> None:
    for expected, actual in zip(runs.alone.curve[2:], runs.resumed.curve, strict=True):
        assert {**actual, "peak_memory_gb": 0} == {**expected, "peak_memory_gb": 0}
    for name, value in runs.alone.adapters.items():
        assert torch.equal(runs.resumed.adapters[name], value), name


def test_a_checkpoint_is_read_by_another_number_of_ranks(runs: Runs) -> None:
    for name, value in runs.alone.adapters.items():
        torch.testing.assert_close(runs.widened.adapters[name], value, rtol=RTOL, atol=WEIGHT_ATOL)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_learn_the_same(runs: Runs, variant: str) -> None:
    learned = runs.variants[variant]
    for expected, actual in zip(runs.alone.curve, learned.curve, strict=True):
        for name in ("ce", "kd/cross", "kd/same", "grad_norm"):
            assert actual[name] == pytest.approx(expected[name], rel=RTOL), name
    for name, value in runs.alone.adapters.items():
        torch.testing.assert_close(learned.adapters[name], value, rtol=RTOL, atol=WEIGHT_ATOL)


@pytest.mark.parametrize("folder", ["merged", "checkpoint/student"])
def test_the_merged_export_is_an_ordinary_model(runs: Runs, folder: str) -> None:
    """Bugs: adapters in the export, or no tokenizer. Tolerance: W + BA is rounded once more than Wx + B(Ax)."""
    path = runs.folder / folder
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    model, loading = loaded
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not (path / "adapter_config.json").exists()
    assert len(AutoTokenizer.from_pretrained(path)) == runs.plan.student_vocab_size
    if folder == "merged":
        with torch.no_grad():
            assert_same_logits(model(input_ids=IDS).logits, runs.alone.logits)


def test_the_adapter_is_loaded_by_peft_onto_the_base(runs: Runs) -> None:
    base = AutoModelForCausalLM.from_pretrained(runs.plan.config.student.model)
    with torch.no_grad():
        base_logits = base(input_ids=IDS).logits.clone()
        adapted_logits = PeftModel.from_pretrained(base, runs.folder / "adapter").eval()(input_ids=IDS).logits
    assert_same_logits(adapted_logits, runs.alone.logits)
    assert (base_logits - adapted_logits).abs().max() > 0.1
    assert len(AutoTokenizer.from_pretrained(runs.folder / "adapter")) == runs.plan.student_vocab_size
    names = sorted(path.name for path in (runs.folder / "adapter").iterdir())
    assert "model.safetensors" not in names


def assert_same_logits(actual: Tensor, expected: Tensor) -> None:
    """Compare sums of about a hundred fp32 terms, over two layers."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
