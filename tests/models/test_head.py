"""Hidden states and a head, in place of logits, for the families of heads that transformers has."""

import pytest
import torch
from torch import nn
from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from nemo_opd.errors import ModelError
from nemo_opd.models.causal_model import HiddenStateModel
from tests.packings import unpadded

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "phi with a bias": PhiConfig(**{**SIZES, "num_key_value_heads": 2}),
    "phi3": Phi3Config(**SIZES),
    "gemma2 with a soft-cap": Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.5),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8),
    "gemma3 with a soft-cap": Gemma3TextConfig(**SIZES, head_dim=8, final_logit_softcapping=0.5),
    "cohere with a scale": CohereConfig(**SIZES, logit_scale=0.3),
    "granite with a divisor": GraniteConfig(**SIZES, logits_scaling=5.0),
}


def model_of(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # Biases start at 0, which hides a missing one.
        nn.init.normal_(parameter, std=0.3)
    return model


IDS = torch.randint(1, 40, (2, 5), generator=torch.Generator().manual_seed(1))
ALL = unpadded(IDS)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_logits_are_the_models_own(kind: str) -> None:
    """Catches wrong logits, or a wrong gradient of any parameter, including a tied head's."""
    model = model_of(CONFIGS[kind])
    expected = model(input_ids=IDS).logits
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    parameters = list(model.parameters())
    expected_gradients = torch.autograd.grad((expected * weight).sum(), parameters)
    output = HiddenStateModel(model, key="student.model")(IDS, ALL)
    assert output.shape == (1, 10, 40)
    torch.testing.assert_close(output.read(torch.arange(10), 40), expected.flatten(0, 1), rtol=1e-5, atol=1e-6)
    logits = output.head.after_linear(nn.functional.linear(output.hidden, output.head.weight, output.head.bias))
    logits = logits.view(expected.shape)
    gradients = torch.autograd.grad((logits * weight).sum(), parameters)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)
    if kind.endswith(("soft-cap", "scale", "divisor")):  # it matters for these inputs
        linear = nn.functional.linear(output.hidden, output.head.weight)
        assert (linear.view(expected.shape) - expected).abs().max() > 0.1


def test_the_model_is_as_it_was() -> None:
    model = model_of(CONFIGS["qwen3"])
    expected = model(input_ids=IDS).logits
    HiddenStateModel(model, key="student.model")(IDS, ALL)
    assert torch.equal(model(input_ids=IDS).logits, expected)


class Shifted(LlamaForCausalLM):
    """A head with a step that we do not know, as a new family may have."""

    def forward(self, *args, **options):
        output = super().forward(*args, **options)
        output.logits = output.logits + 1
        return output


def test_what_is_not_a_plain_head_is_refused() -> None:
    model = model_of(CONFIGS["llama"])
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ModelError, match=r"teachers\.0\.model: the head is a Sequential.*use handoff=logits"):
        HiddenStateModel(model, key="teachers.0.model")
    with pytest.raises(ModelError, match=r"student\.model: Shifted does more.*use handoff=logits"):
        HiddenStateModel(Shifted(CONFIGS["llama"]).eval(), key="student.model")(IDS, ALL)


def test_a_text_that_overflows_says_nothing_about_the_head() -> None:
    """Bug: a model that returns NaN is refused as having an unknown head, with the advice handoff=logits."""
    model = model_of(CONFIGS["qwen3"])
    source, embedding = HiddenStateModel(model, key="student.model"), model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _, __, embedded: embedded * float("nan"))
    assert source(IDS, ALL).hidden.isnan().all()
    hook.remove()
    assert source(IDS, ALL).hidden.isfinite().all()
