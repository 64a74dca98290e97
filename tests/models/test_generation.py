"""Generation in training: a sharded model samples as an unsharded one does, and training then goes on unchanged."""

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
from nemo_opd.rollout.engine_interface import BatchLimit, Completion, Request, Sampling
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
"""One with tied embeddings, and one with parameters that tensor parallelism does not cut."""
CASES = [(FAMILIES[0], "dp"), (FAMILIES[0], "tp, positions shared"), (FAMILIES[1], "tp")]


@dataclass(frozen=True)
class RankResult:
    """One rank's completions and weights for one family and layout."""

    first_rollout: list[Completion]
    second_rollout: list[Completion]
    """After one update."""
    updated: dict[str, Tensor]
    """Weights after the update."""
    updated_without: dict[str, Tensor]
    """Weights after an update without a rollout before it."""
    was_restored: bool


def requests_of(rank: int) -> list[Request]:
    """Return requests that differ between ranks in prompts, lengths and number of batches."""
    random = np.random.default_rng(rank)
    count, new = ((5, 12), (2, 4))[rank]
    lengths = random.integers(1, 15, count)
    return [Request(random.integers(0, USED, n).astype(np.int32), new, 10 * rank + i) for i, n in enumerate(lengths)]


def sample(model: PreTrainedModel, requests: list[Request]) -> list[Completion]:
    sampler = Sampler(model, end_ids=(2, 7), vocab_size=USED, limit=BatchLimit(3), device="cpu")
    return sampler.generate(requests, Sampling(), 0)


def on_rank(folders: dict[str, Path]) -> dict[str, RankResult]:
    return {f"{family}/{layout}": sample_and_train(folders[family], LAYOUTS[layout]) for family, layout in CASES}


def sample_and_train(folder: Path, parallelism: Parallelism) -> RankResult:
    mesh, model = cut(folder, parallelism, activation_checkpointing=True)
    requests = requests_of(dist.get_rank() if tensor_axis(mesh) is None else 0)
    model.train()
    # Before the first forward pass, which initialises FSDP2.
    with generating(model, mesh):
        first_rollout = sample(model, requests)
    is_sharded = [isinstance(parameter, DTensor) for parameter in model.parameters()]
    was_restored = model.training and all(flag == (mesh.size() > 1) for flag in is_sharded)
    updated = train(model, mesh, parallelism)[0].weights
    with generating(model, mesh):
        second_rollout = sample(model, requests)
    mesh, fresh_model = cut(folder, parallelism, activation_checkpointing=True)
    updated_without = train(fresh_model, mesh, parallelism)[0].weights
    return RankResult(first_rollout, second_rollout, updated, updated_without, was_restored)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {family: save(family, folder) for family in FAMILIES}


@pytest.fixture(scope="module")
def ranks(saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, RankResult]]:
    return on_ranks(RANKS, on_rank, saved, tmp_path_factory.mktemp("ranks"))


def assert_same(completions: list[Completion], expected: list[Completion]) -> None:
    assert [completion.ids.tolist() for completion in completions] == [
        completion.ids.tolist() for completion in expected
    ]
    for actual, reference in zip(completions, expected, strict=True):
        # Log-probabilities of magnitude ≤ 10, from logits rounded to float32.
        np.testing.assert_allclose(actual.logprobs, reference.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_cut_over_ranks_it_samples_what_it_samples_whole(
    ranks: list[dict[str, RankResult]], saved: dict[str, Path], family: str, layout: str
) -> None:
    """Bugs: data-parallel ranks, which finish after different numbers of steps, deadlock;
    tensor-parallel ranks sample different tokens."""
    model: Any = load_model(str(saved[family]), torch.float64, key="model").eval()
    for rank, results in enumerate(ranks):
        requests = requests_of(rank if layout == "dp" else 0)
        model.load_state_dict(load_model(str(saved[family]), torch.float64, key="model").state_dict())
        assert_same(results[f"{family}/{layout}"].first_rollout, sample(model, requests))
        model.load_state_dict(results[f"{family}/{layout}"].updated, strict=False)
        assert_same(results[f"{family}/{layout}"].second_rollout, sample(model, requests))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_an_update_after_a_rollout_is_the_one_without(
    ranks: list[dict[str, RankResult]], family: str, layout: str
) -> None:
    for results in ranks:
        result = results[f"{family}/{layout}"]
        assert result.was_restored
        assert result.updated.keys() == result.updated_without.keys()
        for name, weight in result.updated.items():
            assert torch.equal(weight, result.updated_without[name]), name


class RefusedError(Exception):
    pass


def refuse(*_: Any, **__: Any) -> None:
    raise RefusedError


def test_a_plain_model_in_training_is_made_fit_and_is_as_it_was() -> None:
    """Bugs: dropout, a switched-off cache, compiled layers or activation checkpointing stay on in generation, or are
    not restored after it."""
    model: Any = model_of("llama, tied")
    expected = sample(model, requests_of(0))
    model.config.attention_dropout = model.model.layers[0].self_attn.attention_dropout = 0.5
    model.config.use_cache = False
    checkpoint_activations(model)
    model.model.layers[1]._compiled_call_impl = refuse
    model.train()
    steps: list[int] = []
    handle = model.model.layers[0].register_forward_hook(lambda _, args, output: steps.append(args[0].shape[1]))

    with generating(model, None):
        assert not torch.is_grad_enabled()
        assert_same(sample(model, requests_of(0)), expected)

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
    """Bug: ring attention, which takes no mask, attends to a prompt's padding."""
    model = model_of("llama, tied")
    expected = sample(model, requests_of(0))
    use_ring_attention(model, 2, key="student.parallelism.cp")
    monkeypatch.setattr("nemo_opd.models.generation.context_axis", lambda _: object())
    monkeypatch.setattr("nemo_opd.models.generation.tensor_axis", lambda _: None)

    mesh: Any = object()
    with generating(model, mesh):
        assert_same(sample(model, requests_of(0)), expected)

    assert model.config._attn_implementation == RING


@pytest.mark.parametrize("family", ["llama, tied", "gemma2, soft-cap", "phi, biases"])
def test_sampled_probabilities_have_the_digits_of_the_losses(family: str) -> None:
    """Bug: the engine's log-probabilities come from bf16 logits and the trainer's from fp32, so ratios are off.

    With `rounds_logits` the losses read the model's own logits, which are rounded in both.
    """
    model: Any = model_of(family).bfloat16()
    ids = torch.arange(1, 13).view(2, 6)
    model_logits = model(ids).logits
    output = HiddenStateModel(model, key="model")(ids, unpadded(ids))
    expected = output.read(torch.arange(12), output.shape[2]).view(model_logits.shape)
    head = model.get_output_embeddings()

    with generating(model, None):
        logits = model(ids).logits
    with generating(model, None, rounds_logits=True):
        rounded = model(ids).logits

    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert (model_logits - expected).abs().max() > 1e-3
    assert torch.equal(rounded, model_logits)
    assert head(torch.zeros(1, head.in_features, dtype=torch.bfloat16)).dtype == torch.bfloat16
