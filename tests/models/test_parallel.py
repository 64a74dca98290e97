"""Cut over two ranks in any way, a model gives the gradients and the update that it gives whole."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_opd.checkpoint.state import load_state, save_state
from nemo_opd.config.parallelism import Parallelism
from nemo_opd.distributed.layout import Layout
from nemo_opd.distributed.mesh import build_mesh, fsdp_axis
from nemo_opd.losses.cross_entropy import cross_entropy
from nemo_opd.losses.head_logits import HeadLogits
from nemo_opd.models.export import save_pretrained
from nemo_opd.models.head import Headless, WithHead
from nemo_opd.models.sharded_load import load_sharded
from tests.models.families import VOCABULARY

RANKS = 2
USED = VOCABULARY - 2
"""The head is wider than the tokenizer."""
IDS = torch.randint(0, USED, (4, 7), generator=torch.Generator().manual_seed(1))
"""An odd number of positions, which sequence_parallel has to pad."""
MASKS = {1.0: torch.rand(IDS.shape, generator=torch.Generator().manual_seed(2)) < 0.7, 0.5: torch.ones_like(IDS).bool()}
"""Two losses: weight, and the tokens that are scored."""
NORMALIZER = 10
CUT = (
    "llama, tied",
    "qwen3, norms of heads",
    "gemma2, soft-cap",
    "phi, biases",
    "phi3, fused",
    "olmo2, norms of all heads",
)
LAYOUTS = {
    "dp": Parallelism(),
    "tp": Parallelism(tp=2),
    "tp, positions shared": Parallelism(tp=2, sequence_parallel=True),
}
TOLERANCE = 4e-6
"""Of a tensor's largest entry. Everything is float64 but FSDP2's sums over ranks and what transformers itself computes
in float32, norms above all: 2**-24 relative each, some dozens of them one after the other.
"""


@dataclass(frozen=True)
class Trained:
    logits: Tensor
    """Of all sequences, before the update."""
    gradients: dict[str, Tensor]
    norm: float
    weights: dict[str, Tensor]


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        """There is none."""


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    # With so large an ε the update is a smooth function of the gradient, and no coin toss where that is 0.
    return torch.optim.AdamW(model.parameters(), lr=0.1, eps=1.0, weight_decay=0.1)


def whole(folder: Path) -> Trained:
    """The oracle: one process, plain autograd over all logits."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    optimizer = adamw(model)
    logits = model(input_ids=IDS).logits
    losses = F.cross_entropy(logits[:, :-1, :USED].flatten(0, 1), IDS[:, 1:].flatten(), reduction="none")
    total = sum(weight * (losses * mask[:, 1:].flatten()).sum() for weight, mask in MASKS.items())
    (total / NORMALIZER).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    optimizer.step()
    return Trained(logits.detach(), gradients, norm, dict(model.named_parameters()))


def cut(
    folder: Path, parallelism: Parallelism, *, activation_checkpointing: bool = False
) -> tuple[Any, PreTrainedModel]:
    mesh = build_mesh(Layout(RANKS // parallelism.tp, 1, parallelism.tp), "cpu")
    model = load_sharded(
        str(folder),
        torch.float64,
        mesh,
        key="student.model",
        parallelism=parallelism,
        compute_dtype=torch.float64,
        device="cpu",
        trainable=True,
        activation_checkpointing=activation_checkpointing,
    )
    return mesh, model


def accumulate(headless: Headless, rows: slice, mesh: Any) -> None:
    """As a student does: losses go backward to a leaf one after the other, then the model's own pass runs once."""
    made = headless(IDS[rows])
    leaf = made.hidden.detach().requires_grad_()
    logits = headless.whole(HeadLogits(leaf, made.head))
    for weight, mask in MASKS.items():
        loss = cross_entropy(logits, IDS[rows], mask=mask[rows], normalizer=NORMALIZER, vocab_size=USED).loss
        (weight * loss * fsdp_axis(mesh).size()).backward()
    headless.backward(made, leaf.grad)


def full(tensors: Iterator[tuple[str, Any]]) -> dict[str, Tensor]:
    return {name: tensor.full_tensor() for name, tensor in tensors}


def train(model: PreTrainedModel, mesh: Any, parallelism: Parallelism) -> tuple[Trained, torch.optim.Optimizer]:
    headless = Headless(model, key="student.model", mesh=mesh, parallelism=parallelism)
    optimizer = adamw(model)
    with torch.no_grad():
        rows = torch.arange(IDS.numel())
        logits = headless.whole(headless(IDS)).read(rows, VOCABULARY)
        of_head = WithHead(model, mesh=mesh, parallelism=parallelism)
        torch.testing.assert_close(of_head.whole(of_head(IDS)).read(rows, VOCABULARY), logits, rtol=1e-6, atol=1e-6)
    model.train()
    own = len(IDS) // fsdp_axis(mesh).size()
    begin = own * fsdp_axis(mesh).get_local_rank()
    for start in range(begin, begin + own, own // 2):
        accumulate(headless, slice(start, start + own // 2), mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    gradients = full((name, parameter.grad) for name, parameter in model.named_parameters())
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    weights = full((name, parameter.detach()) for name, parameter in model.named_parameters())
    return Trained(logits.view(*IDS.shape, -1), gradients, norm.full_tensor().item(), weights), optimizer


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
        for layout, parallelism in LAYOUTS.items():
            mesh, model = cut(folder, parallelism, activation_checkpointing="positions" in layout)
            found, optimizer = train(model, mesh, parallelism)
            errors[f"{family}/{layout}"] = compared(found, wanted)
            if family.startswith("llama"):
                errors[f"{family}/{layout}/saved"] = saved_and_read(model, optimizer, folder, output / layout)
    return errors


def saved_and_read(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, source: Path, folder: Path
) -> dict[str, float]:
    """Read what one layout saved into a data-parallel model, export both, and compare."""
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    save_state(folder / "state", model, optimizer, scheduler)
    save_pretrained(model, NoTokenizer(), folder / "exported", torch.float64)
    _, other = cut(source, Parallelism())
    other_optimizer = adamw(other)
    load_state(folder / "state", other, other_optimizer, LambdaLR(other_optimizer, lambda _: 1.0))
    save_pretrained(other, NoTokenizer(), folder / "again", torch.float64)
    exported, again = load_file(folder / "exported/model.safetensors"), load_file(folder / "again/model.safetensors")
    assert exported.keys() == again.keys()
    differences = {f"exported {name}": difference(again[name], each) for name, each in exported.items()}
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", CUT)
def test_gradients_and_update(errors: dict[str, dict[str, float]], family: str, layout: str) -> None:
    """Also of tied embeddings, of what sees only its own heads, and of biases that are added once."""
    wrong = {what: error for what, error in errors[f"{family}/{layout}"].items() if not error < TOLERANCE}
    assert not wrong


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_is_read_by_another_layout_and_exported_the_same(
    errors: dict[str, dict[str, float]], layout: str
) -> None:
    wrong = {what: error for what, error in errors[f"llama, tied/{layout}/saved"].items() if error}
    assert not wrong
