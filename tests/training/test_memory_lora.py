"""What adapters cost is estimated from them alone, as peft counts them."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from nemo_opd.config import RunConfig
from nemo_opd.config.model import Lora, Student
from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ModelError
from nemo_opd.models.lora import Adapters
from nemo_opd.preflight.memory import Machine, MemoryInputs, ModelSetup, Phase, Rank, estimate
from nemo_opd.preflight.model_info import model_size
from tests.composition import compose

CONFIG = LlamaConfig(
    vocab_size=32_000,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)


def adapted(**settings: object) -> Adapters:
    return Adapters(Lora.model_validate(settings), "base", 0)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_parameters_are_those_that_peft_trains(targets: str | list[str]) -> None:
    size = model_size(CONFIG, adapted(rank=8, target_modules=targets))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
        peft = get_peft_model(model, LoraConfig(r=8, target_modules=targets))
    trained, total = peft.get_nb_trainable_parameters()
    assert sum(a * b for a, b in size.trained_shapes) == trained
    assert size.parameters == total - trained
    assert sum(a * b for layer in size.layers for a, b in layer.trained_shapes) == trained


def test_targets_that_are_not_there_are_told_before_anything_loads() -> None:
    with pytest.raises(ModelError, match="has no linear layer query"):
        model_size(CONFIG, adapted(target_modules=["query"]))


def situation(adapters: Adapters | None, ranks: int = 1) -> MemoryInputs:
    setup = ModelSetup(model_size(CONFIG, adapters), 32_000, Layout(ranks))
    return MemoryInputs(setup, (), Machine("cuda", 80 * 2**30, None, ranks))


@pytest.fixture(scope="module")
def config() -> RunConfig:
    """The student alone, in bf16."""
    own = compose("train.max_length=512", "student.dtype=bfloat16")
    return own.model_copy(update={"teachers": ()})


def test_only_adapters_have_gradients_and_moments(config: RunConfig) -> None:
    adapters = adapted(rank=8)
    found = situation(adapters)
    memory = estimate(config, found).memories[0]
    by_name = {part.name: part for part in memory.parts}
    trained = sum(a * b for a, b in found.student.size.trained_shapes)
    assert by_name["parameters"].at(Phase.BACKWARD) == 2 * found.student.size.parameters + 4 * trained
    assert by_name["optimizer"].at(Phase.BACKWARD) == 8 * trained
    assert by_name["gradients"].at(Phase.BACKWARD) == 4 * trained
    hidden = config.train.longest_at_a_time(1) * 512 * CONFIG.hidden_size * 2
    assert by_name["gradients of hidden states and head"].at(Phase.BACKWARD) == hidden


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_adapters_keep_for_backward_is_measured(dropout: float) -> None:
    """Autograd keeps at most as much: norms with frozen weights keep less than the formula says."""
    small = tiny_config()
    adapters = adapted(rank=16, dropout=dropout)
    setup = ModelSetup(model_size(small, adapters), small.vocab_size, Layout(1))
    estimated = Rank(Student(model="m", dtype="float32"), setup, "cpu").saved(128, 64, checkpointing=False)
    assert estimated == pytest.approx(kept(small, adapters), rel=0.2)


def tiny_config() -> LlamaConfig:
    return LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)


def kept(config: LlamaConfig, adapters: Adapters | None) -> int:
    """Bytes of storages that a forward pass keeps, but for parameters."""
    model = AutoModelForCausalLM.from_config(config).train()
    if adapters is not None:
        adapters.attach(model)
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
    storages: dict[int, int] = {}
    tensors = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(input_ids=torch.zeros(2, 64, dtype=torch.long), use_cache=False)
    return sum(storages.values())
