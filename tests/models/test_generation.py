"""A model as it is trained generates as it would whole, and trains on as if it had not."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nemo_opd.config.model import Parallelism
from nemo_opd.distributed.process_group import tensor_axis
from nemo_opd.models.causal_model import HiddenStateModel
from nemo_opd.models.generation import generating
from nemo_opd.models.load import load_model
from nemo_opd.models.packed_attention import RING, use_ring_attention
from nemo_opd.models.parallelize import checkpoint_activations
from nemo_opd.rollout.requests import BatchLimit, Completion, Request, Sampling
from nemo_opd.rollout.transformers_engine import Sampler
from tests.models.families import model_of, save
from tests.models.one_update import USED, cut, train
from tests.models.world import on_ranks
from tests.packings import unpadded

pytestmark = pytest.mark.world

RANKS = 2
LAYOUTS = {
    "dp": Parallelism(),
    "tp": Parallelism(tp=2),
    "tp, positions shared": Parallelism(tp=2, sequence_parallel=True),
}
FAMILIES = ("llama, tied", "qwen3, norms of heads")
"""One with a head that is the embedding, and one with parameters that tensor parallelism leaves whole."""
CASES = [(FAMILIES[0], "dp"), (FAMILIES[0], "tp, positions shared"), (FAMILIES[1], "tp")]


@dataclass(frozen=True)
class OfRank:
    """What one rank did with one family in one layout."""

    before: list[Completion]
    after: list[Completion]
    """An update later."""
    updated: dict[str, Tensor]
    """Weights, after the update."""
    updated_without: dict[str, Tensor]
    """The same without a rollout before."""
    was_restored: bool


def asked(rank: int) -> list[Request]:
    """Of data-parallel ranks: other prompts, other lengths, and another number of batches."""
    random = np.random.default_rng(rank)
    count, new = ((5, 12), (2, 4))[rank]
    lengths = random.integers(1, 15, count)
    return [Request(random.integers(0, USED, n).astype(np.int32), new, 10 * rank + i) for i, n in enumerate(lengths)]


def sample(model: PreTrainedModel, requests: list[Request]) -> list[Completion]:
    sampler = Sampler(model, end_ids=(2, 7), vocab_size=USED, limit=BatchLimit(3), device="cpu")
    return sampler.generate(requests, Sampling(), 0)


def on_rank(folders: dict[str, Path]) -> dict[str, OfRank]:
    return {f"{family}/{layout}": of_layout(folders[family], LAYOUTS[layout]) for family, layout in CASES}


def of_layout(folder: Path, parallelism: Parallelism) -> OfRank:
    mesh, model = cut(folder, parallelism, activation_checkpointing=True)
    requests = asked(dist.get_rank() if tensor_axis(mesh) is None else 0)
    model.train()
    # Before any forward pass, when FSDP2 has not made itself ready.
    with generating(model, mesh):
        before = sample(model, requests)
    was_restored = model.training and all(isinstance(each, DTensor) == (mesh.size() > 1) for each in model.parameters())
    updated = train(model, mesh, parallelism)[0].weights
    with generating(model, mesh):
        after = sample(model, requests)
    mesh, other = cut(folder, parallelism, activation_checkpointing=True)
    return OfRank(before, after, updated, train(other, mesh, parallelism)[0].weights, was_restored)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {family: save(family, folder) for family in FAMILIES}


@pytest.fixture(scope="module")
def ranks(saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, OfRank]]:
    return on_ranks(RANKS, on_rank, saved, tmp_path_factory.mktemp("ranks"))


def assert_same(found: list[Completion], wanted: list[Completion]) -> None:
    assert [each.ids.tolist() for each in found] == [each.ids.tolist() for each in wanted]
    for left, right in zip(found, wanted, strict=True):
        # Logits are rounded to float32 before they become log-probabilities of 10 at most.
        np.testing.assert_allclose(left.logprobs, right.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_cut_over_ranks_it_samples_what_it_samples_whole(
    ranks: list[dict[str, OfRank]], saved: dict[str, Path], family: str, layout: str
) -> None:
    """Data-parallel ranks finish after other numbers of steps; tensor-parallel ones give the same on each rank."""
    whole: Any = load_model(str(saved[family]), torch.float64, key="model").eval()
    for rank, made in enumerate(ranks):
        requests = asked(rank if layout == "dp" else 0)
        whole.load_state_dict(load_model(str(saved[family]), torch.float64, key="model").state_dict())
        assert_same(made[f"{family}/{layout}"].before, sample(whole, requests))
        whole.load_state_dict(made[f"{family}/{layout}"].updated, strict=False)
        assert_same(made[f"{family}/{layout}"].after, sample(whole, requests))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_an_update_after_a_rollout_is_the_one_without(ranks: list[dict[str, OfRank]], family: str, layout: str) -> None:
    for made in ranks:
        of_rank = made[f"{family}/{layout}"]
        assert of_rank.was_restored
        assert of_rank.updated.keys() == of_rank.updated_without.keys()
        for name, weight in of_rank.updated.items():
            assert torch.equal(weight, of_rank.updated_without[name]), name


class RefusedError(Exception):
    pass


def refuse(*_: Any, **__: Any) -> None:
    raise RefusedError


def test_a_plain_model_in_training_is_made_fit_and_is_as_it_was() -> None:
    """Dropout, a cache that training switched off, layers that are compiled, checkpointed activations."""
    model: Any = model_of("llama, tied")
    wanted = sample(model, asked(0))
    model.config.attention_dropout = model.model.layers[0].self_attn.attention_dropout = 0.5
    model.config.use_cache = False
    checkpoint_activations(model)
    model.model.layers[1]._compiled_call_impl = refuse
    model.train()
    steps: list[int] = []
    handle = model.model.layers[0].register_forward_hook(lambda _, args, output: steps.append(args[0].shape[1]))

    with generating(model, None):
        assert not torch.is_grad_enabled()
        assert_same(sample(model, asked(0)), wanted)

    handle.remove()
    assert 1 in steps  # one position at a time: with a cache
    assert model.training
    assert torch.is_grad_enabled()
    assert not model.config.use_cache
    with pytest.raises(RefusedError):
        model(torch.ones(1, 3, dtype=torch.int64), use_cache=False)


def test_also_after_an_error() -> None:
    model = model_of("llama, tied").train()

    with pytest.raises(RefusedError), generating(model, None):
        refuse()

    assert model.training


def test_a_model_for_shared_positions_samples_whole_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attention takes no mask, so what pads a prompt would be attended to."""
    model = model_of("llama, tied")
    wanted = sample(model, asked(0))
    use_ring_attention(model, 2, key="student.parallelism.cp")
    monkeypatch.setattr("nemo_opd.models.generation.context_axis", lambda _: object())
    monkeypatch.setattr("nemo_opd.models.generation.tensor_axis", lambda _: None)

    mesh: Any = object()
    with generating(model, mesh):
        assert_same(sample(model, asked(0)), wanted)

    assert model.config._attn_implementation == RING


@pytest.mark.parametrize("family", ["llama, tied", "gemma2, soft-cap", "phi, biases"])
def test_sampled_probabilities_have_the_digits_of_the_losses(family: str) -> None:
    """Bug: an engine's log-probabilities of bf16 logits beside a trainer's of fp32, whose ratios are off by a rounding.

    Unless the losses read the model's own logits, which are rounded alike.
    """
    model: Any = model_of(family).bfloat16()
    ids = torch.arange(1, 13).view(2, 6)
    own = model(ids).logits
    made = HiddenStateModel(model, key="model")(ids, unpadded(ids))
    expected = made.read(torch.arange(12), made.shape[2]).view(own.shape)
    head = model.get_output_embeddings()

    with generating(model, None):
        found = model(ids).logits
    with generating(model, None, rounds_logits=True):
        rounded = model(ids).logits

    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (own - expected).abs().max() > 1e-3
    assert torch.equal(rounded, own)
    assert head(torch.zeros(1, head.in_features, dtype=torch.bfloat16)).dtype == torch.bfloat16
