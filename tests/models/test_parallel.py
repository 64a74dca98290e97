"""A sharded model has the same gradients and update as an unsharded one, in every layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_opd.checkpoint.state import load_state, save_state
from nemo_opd.config.model import Parallelism
from nemo_opd.models.causal_model import LogitModel
from nemo_opd.models.export import save_pretrained
from tests.models.families import MIXED, VOCABULARY, save
from tests.models.one_update import IDS, MASKS, NORMALIZER, USED, Trained, adamw, cut, train
from tests.models.world import on_ranks
from tests.packings import unpadded

pytestmark = pytest.mark.world

LAYOUTS = {
    "dp": Parallelism(),
    "tp": Parallelism(tp=2),
    "tp, positions shared": Parallelism(tp=2, sequence_parallel=True),
}
FAMILY = "llama, tied"
"""The family for tests of checkpoints and of several copies."""
FAMILY_LAYOUTS = {
    "llama, tied": tuple(LAYOUTS),
    "qwen3, norms of heads": ("tp, positions shared",),
    "gemma2, soft-cap": ("dp", "tp, positions shared"),
    "phi, biases": ("tp, positions shared",),
    "phi3, fused": ("tp",),
    "olmo2, norms of all heads": ("tp, positions shared",),
    "qwen3_moe, and a dense layer": ("dp", "tp"),
    "mixtral, all layers": ("tp, positions shared",),
    "gpt_oss, biases and sinks": ("tp",),
    "deepseek_v3, shared experts": ("tp",),
}
"""Layouts that treat a family specially: data parallelism treats all parameters alike."""
COPIES = {"two copies": Parallelism(replicas=2)}
SHARDED_COPIES = {**COPIES, "two copies, tp": Parallelism(replicas=2, tp=2)}
"""On four ranks."""
TOLERANCE = 4e-6
"""Relative to a tensor's largest entry. Everything is float64 except FSDP2's sums over ranks and transformers' own
float32 operations (norms): dozens of roundings of 2**-24 each.
"""


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        """Save nothing."""


def trained_on_one_rank(folder: Path) -> Trained:
    """Return the oracle's result: one process, plain autograd over all logits, a loop over a mixture's experts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    optimizer = adamw(model)
    logits = model(input_ids=IDS).logits
    losses = F.cross_entropy(logits[:, :-1, :USED].flatten(0, 1), IDS[:, 1:].flatten(), reduction="none")
    total = sum(weight * (losses * mask[:, 1:].flatten()).sum() for weight, mask in MASKS.items())
    (total / NORMALIZER).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    optimizer.step()
    return Trained(logits.detach(), gradients, norm, dict(model.named_parameters()))


def difference(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max())


def compared(actual: Trained, expected: Trained) -> dict[str, float]:
    assert actual.gradients.keys() == expected.gradients.keys()
    return {
        "logits": difference(actual.logits, expected.logits),
        "norm": abs(actual.norm / expected.norm - 1),
        **{
            f"gradient of {name}": difference(actual.gradients[name], grad) for name, grad in expected.gradients.items()
        },
        **{f"updated {name}": difference(actual.weights[name], weight) for name, weight in expected.weights.items()},
    }


def errors_on_rank(folders: Mapping[str, Path], output: Path) -> dict[str, dict[str, float]]:
    """Return the differences from the oracle, keyed by family and layout, then by tensor."""
    errors: dict[str, dict[str, float]] = {}
    for family, folder in folders.items():
        expected = trained_on_one_rank(folder)
        if family in MIXED:
            errors[f"{family}/default"] = {"logits": difference(default_experts(folder).double(), expected.logits)}
        for layout in (*FAMILY_LAYOUTS[family], *(COPIES if family == FAMILY else ())):
            parallelism = (LAYOUTS | COPIES)[layout]
            mesh, model = cut(folder, parallelism, activation_checkpointing="positions" in layout)
            if family in MIXED:
                model.set_experts_implementation("batched_mm")  # the default has no float64
            trained, optimizer = train(model, mesh, parallelism)
            errors[f"{family}/{layout}"] = compared(trained, expected)
            if family == FAMILY:
                errors[f"{family}/{layout}/saved"] = saved_and_read(model, optimizer, folder, output / layout)
    return errors


def default_experts(folder: Path) -> Tensor:
    """Return logits with transformers' default implementation of experts, in float32."""
    parallelism = Parallelism(tp=2)
    mesh, model = cut(folder, parallelism, dtype=torch.float32)
    source, packing = LogitModel(model, mesh=mesh, parallelism=parallelism), unpadded(IDS)
    with torch.no_grad():
        logits = source.whole(source(IDS, packing), packing).read(torch.arange(IDS.numel()), VOCABULARY)
    return logits.view(*IDS.shape, -1)


def saved_and_read(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, source: Path, folder: Path
) -> dict[str, float]:
    """Read what one layout saved into a data-parallel model, export both, and compare.

    Each rank saves a different generator; they are read as for pairs of ranks that share matrices (tp=2).
    """
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    torch.manual_seed(dist.get_rank())
    save_state(folder / "state", model, optimizer, scheduler)
    save_pretrained(model, NoTokenizer(), folder / "exported", torch.float64)
    _, fresh_model = cut(source, Parallelism())
    fresh_optimizer = adamw(fresh_model)
    load_state(folder / "state", fresh_model, fresh_optimizer, LambdaLR(fresh_optimizer, lambda _: 1.0), tp=2)
    drawn = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(drawn, torch.rand(()))
    save_pretrained(fresh_model, NoTokenizer(), folder / "again", torch.float64)
    exported, again = load_file(folder / "exported/model.safetensors"), load_file(folder / "again/model.safetensors")
    assert exported.keys() == again.keys()
    differences = {f"exported {name}": difference(again[name], tensor) for name, tensor in exported.items()}
    differences["dropout of ranks that share matrices"] = difference(torch.stack(drawn[1::2]), torch.stack(drawn[::2]))
    for (name, parameter), fresh_parameter in zip(model.named_parameters(), fresh_model.parameters(), strict=True):
        for moment in ("exp_avg", "exp_avg_sq"):
            expected: Any = optimizer.state[parameter][moment]
            actual: Any = fresh_optimizer.state[fresh_parameter][moment]
            differences[f"{moment} of {name}"] = difference(actual.full_tensor(), expected.full_tensor())
    return differences


@pytest.fixture
def errors(two_ranks: list[Any]) -> dict[str, dict[str, float]]:
    merged: dict[str, dict[str, float]] = two_ranks[0].errors
    assert merged.keys() == two_ranks[1].errors.keys()
    return merged


@pytest.mark.parametrize(
    ("family", "layout"), [(family, layout) for family, layouts in FAMILY_LAYOUTS.items() for layout in layouts]
)
def test_gradients_and_update(errors: dict[str, dict[str, float]], family: str, layout: str) -> None:
    """Bugs: tied embeddings or norms of single heads learn from one rank alone; biases are added once per rank.

    In mixtures: a token's experts on another rank are ignored, its shared expert is added twice, or a router learns
    from its own rank's experts alone.
    """
    wrong = {name: error for name, error in errors[f"{family}/{layout}"].items() if not error < TOLERANCE}
    assert not wrong


@pytest.mark.parametrize("family", MIXED)
def test_experts_that_a_rank_leaves_out_add_nothing(errors: dict[str, dict[str, float]], family: str) -> None:
    """Bug: grouped products do not write the rows of other ranks' experts, and these rows are added to the sum."""
    assert 0 < errors[f"{family}/default"]["logits"] < 300 * 2**-24


@pytest.mark.parametrize("layout", [*LAYOUTS, *COPIES])
def test_a_checkpoint_is_read_by_another_layout_and_exported_the_same(
    errors: dict[str, dict[str, float]], layout: str
) -> None:
    wrong = {name: error for name, error in errors[f"{FAMILY}/{layout}/saved"].items() if error}
    assert not wrong


@pytest.mark.parametrize("layout", COPIES)
def test_gradients_and_update_of_several_copies(errors: dict[str, dict[str, float]], layout: str) -> None:
    """Bugs: gradients are averaged within a copy only; a norm counts each copy."""
    test_gradients_and_update(errors, FAMILY, layout)


@pytest.mark.nightly
def test_copies_that_are_sharded(tmp_path: Path) -> None:
    """Bugs as above, and copies sharded over each other's ranks."""
    folder = save(FAMILY, tmp_path)
    for rank_errors in on_ranks(4, errors_of_sharded_copies, folder, tmp_path / "ranks"):
        merged = {
            f"{layout}: {name}": error for layout, errors in rank_errors.items() for name, error in errors.items()
        }
        assert merged
        assert {name: error for name, error in merged.items() if not error < TOLERANCE} == {}


def errors_of_sharded_copies(folder: Path) -> dict[str, dict[str, float]]:
    expected, errors = trained_on_one_rank(folder), {}
    for layout, parallelism in SHARDED_COPIES.items():
        mesh, model = cut(folder, parallelism)
        trained, optimizer = train(model, mesh, parallelism)
        errors[layout] = compared(trained, expected) | saved_and_read(model, optimizer, folder, folder / layout)
    return errors
