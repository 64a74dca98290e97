"""Cut over ranks in any way, a model gives the gradients and the update that it gives whole."""

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
"""The family whose checkpoints are read, and which is cut in several copies."""
OF_FAMILY = {
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
"""Layouts in which a family has something that others have not: data parallelism takes any parameter for any other."""
COPIES = {"two copies": Parallelism(replicas=2)}
SHARDED_COPIES = {**COPIES, "two copies, tp": Parallelism(replicas=2, tp=2)}
"""On four ranks."""
TOLERANCE = 4e-6
"""Of a tensor's largest entry. Everything is float64 but FSDP2's sums over ranks and what transformers itself computes
in float32, norms above all: 2**-24 relative each, some dozens of them one after the other.
"""


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        """There is none."""


def whole(folder: Path) -> Trained:
    """The oracle: one process, plain autograd over all logits, of mixtures a loop over experts."""
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


def difference(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max())


def compared(found: Trained, wanted: Trained) -> dict[str, float]:
    assert found.gradients.keys() == wanted.gradients.keys()
    return {
        "logits": difference(found.logits, wanted.logits),
        "norm": abs(found.norm / wanted.norm - 1),
        **{f"gradient of {name}": difference(found.gradients[name], each) for name, each in wanted.gradients.items()},
        **{f"updated {name}": difference(found.weights[name], each) for name, each in wanted.weights.items()},
    }


def errors_on_rank(folders: Mapping[str, Path], output: Path) -> dict[str, dict[str, float]]:
    """Family and layout → what differs, and by how much."""
    errors: dict[str, dict[str, float]] = {}
    for family, folder in folders.items():
        wanted = whole(folder)
        if family in MIXED:
            errors[f"{family}/default"] = {"logits": difference(default_experts(folder).double(), wanted.logits)}
        for layout in (*OF_FAMILY[family], *(COPIES if family == FAMILY else ())):
            parallelism = (LAYOUTS | COPIES)[layout]
            mesh, model = cut(folder, parallelism, activation_checkpointing="positions" in layout)
            if family in MIXED:
                model.set_experts_implementation("batched_mm")  # the default has no float64
            found, optimizer = train(model, mesh, parallelism)
            errors[f"{family}/{layout}"] = compared(found, wanted)
            if family == FAMILY:
                errors[f"{family}/{layout}/saved"] = saved_and_read(model, optimizer, folder, output / layout)
    return errors


def default_experts(folder: Path) -> Tensor:
    """Logits of the way of computing experts that transformers takes by itself, in its float32."""
    parallelism = Parallelism(tp=2)
    mesh, model = cut(folder, parallelism, dtype=torch.float32)
    with_head, packing = LogitModel(model, mesh=mesh, parallelism=parallelism), unpadded(IDS)
    with torch.no_grad():
        logits = with_head.whole(with_head(IDS, packing), packing).read(torch.arange(IDS.numel()), VOCABULARY)
    return logits.view(*IDS.shape, -1)


def saved_and_read(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, source: Path, folder: Path
) -> dict[str, float]:
    """Read what one layout saved into a data-parallel model, export both, and compare.

    Generators, which differ where they are saved, are read as for pairs of ranks that share matrices.
    """
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    torch.manual_seed(dist.get_rank())
    save_state(folder / "state", model, optimizer, scheduler)
    save_pretrained(model, NoTokenizer(), folder / "exported", torch.float64)
    _, other = cut(source, Parallelism())
    other_optimizer = adamw(other)
    load_state(folder / "state", other, other_optimizer, LambdaLR(other_optimizer, lambda _: 1.0), tp=2)
    drawn = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(drawn, torch.rand(()))
    save_pretrained(other, NoTokenizer(), folder / "again", torch.float64)
    exported, again = load_file(folder / "exported/model.safetensors"), load_file(folder / "again/model.safetensors")
    assert exported.keys() == again.keys()
    differences = {f"exported {name}": difference(again[name], each) for name, each in exported.items()}
    differences["dropout of ranks that share matrices"] = difference(torch.stack(drawn[1::2]), torch.stack(drawn[::2]))
    for (name, left), right in zip(model.named_parameters(), other.parameters(), strict=True):
        for moment in ("exp_avg", "exp_avg_sq"):
            wanted: Any = optimizer.state[left][moment]
            read: Any = other_optimizer.state[right][moment]
            differences[f"{moment} of {name}"] = difference(read.full_tensor(), wanted.full_tensor())
    return differences


@pytest.fixture
def errors(two_ranks: list[Any]) -> dict[str, dict[str, float]]:
    merged: dict[str, dict[str, float]] = two_ranks[0].errors
    assert merged.keys() == two_ranks[1].errors.keys()
    return merged


@pytest.mark.parametrize(("family", "layout"), [(family, each) for family in OF_FAMILY for each in OF_FAMILY[family]])
def test_gradients_and_update(errors: dict[str, dict[str, float]], family: str, layout: str) -> None:
    """Also of tied embeddings, of what sees only its own heads, and of biases that are added once. Bugs of mixtures: a
    token's experts on the other rank are left out, its shared expert is added twice, or a router learns from its
    rank's experts alone."""
    wrong = {what: error for what, error in errors[f"{family}/{layout}"].items() if not error < TOLERANCE}
    assert not wrong


@pytest.mark.parametrize("family", MIXED)
def test_experts_that_a_rank_leaves_out_add_nothing(errors: dict[str, dict[str, float]], family: str) -> None:
    """Bug: rows of tokens for other ranks' experts, which grouped products do not write, are added to the sum."""
    assert 0 < errors[f"{family}/default"]["logits"] < 300 * 2**-24


@pytest.mark.parametrize("layout", [*LAYOUTS, *COPIES])
def test_a_checkpoint_is_read_by_another_layout_and_exported_the_same(
    errors: dict[str, dict[str, float]], layout: str
) -> None:
    wrong = {what: error for what, error in errors[f"{FAMILY}/{layout}/saved"].items() if error}
    assert not wrong


@pytest.mark.parametrize("layout", COPIES)
def test_gradients_and_update_of_several_copies(errors: dict[str, dict[str, float]], layout: str) -> None:
    """Bugs: gradients that are averaged over a copy alone; a norm that counts each copy."""
    test_gradients_and_update(errors, FAMILY, layout)


@pytest.mark.nightly
def test_copies_that_are_sharded(tmp_path: Path) -> None:
    """Bugs as above, and copies that are sharded over each other's ranks."""
    folder = save(FAMILY, tmp_path)
    for found in on_ranks(4, errors_of_sharded_copies, folder, tmp_path / "ranks"):
        wrong = {f"{layout}: {what}": error for layout, each in found.items() for what, error in each.items()}
        assert wrong
        assert {what: error for what, error in wrong.items() if not error < TOLERANCE} == {}


def errors_of_sharded_copies(folder: Path) -> dict[str, dict[str, float]]:
    wanted, errors = whole(folder), {}
    for layout, parallelism in SHARDED_COPIES.items():
        mesh, model = cut(folder, parallelism)
        found, optimizer = train(model, mesh, parallelism)
        errors[layout] = compared(found, wanted) | saved_and_read(model, optimizer, folder, folder / layout)
    return errors
