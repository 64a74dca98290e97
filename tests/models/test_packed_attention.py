"""A packed sequence gives the same logits and gradients as the sequence alone, in every family."""

from collections.abc import Iterator
from copy import deepcopy
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import (
    BartConfig,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
    RobertaConfig,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from nemo_opd.models import packed_attention
from nemo_opd.models.causal_model import HiddenStateModel
from nemo_opd.models.packed_attention import is_packable
from nemo_opd.models.parallelize import checkpoint_activations
from tests.models.families import FAMILIES, SIZES, VOCABULARY
from tests.packings import packing_of

LENGTHS = (7, 1, 4, 4, 9)
WINDOW = 3
"""Shorter than most of the sequences."""
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8}
PACKABLE: dict[str, PretrainedConfig] = {
    **{name: config for name, config in FAMILIES.items() if not isinstance(config, Gemma2Config)},
    "mistral, window": MistralConfig(**SIZES, head_dim=8, sliding_window=WINDOW),
    "qwen2, windows in some layers": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "opt, learned positions": OPTConfig(**SIZES, ffn_dim=24, word_embed_proj_dim=16),
    "gpt2, learned positions": GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, eos_token_id=2),
    "qwen3, experts": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4, moe_intermediate_size=8),
    "mixtral, experts": MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4),
    "deepseek3, latent attention": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    ),
}
OTHERS: dict[str, PretrainedConfig] = {
    "gemma2, soft-cap in attention": Gemma2Config(**SIZES, head_dim=8),
    "gpt-oss, sinks": GptOssConfig(
        **SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=2, sliding_window=WINDOW
    ),
    "llama4, chunks": Llama4TextConfig(**SIZES, head_dim=8, num_local_experts=1, attention_chunk_size=WINDOW),
    "lfm2, convolutions": Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
    "bart, positions of the whole row": BartConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=24,
        is_decoder=True,
        is_encoder_decoder=False,
    ),
    "roberta, positions behind the padding's": RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        is_decoder=True,
    ),
    "falcon-h1, states": FalconH1Config(**SIZES, mamba_d_ssm=16, mamba_n_heads=4, mamba_d_state=4, mamba_expand=1),
}


def model_of(config: PretrainedConfig, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = deepcopy(config)
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def sequences() -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(4, VOCABULARY, (length,), generator=random) for length in LENGTHS]


def alone(model: Any) -> Tensor:
    """Return the logits [N, V] of all tokens, from a call for each sequence."""
    return torch.cat([model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0] for ids in sequences()])


def in_one_row(model: PreTrainedModel) -> Tensor:
    """Return the logits [N, V], and leave the gradient of their weighted sum."""
    packing = packing_of(*LENGTHS, width=10)
    ids = nn.utils.rnn.pad_sequence(sequences(), batch_first=True)
    ids = nn.functional.pad(ids, (0, 10 - ids.shape[1]))
    source = HiddenStateModel(model, key="student.model")
    output = source(ids, packing)
    head = output.head
    logits = head.after_linear(nn.functional.linear(output.hidden, head.weight, head.bias)).squeeze(0)
    (gradient,) = torch.autograd.grad((logits * weights(logits)).sum(), output.hidden, retain_graph=True)
    source.backward(output, gradient, packing)
    return logits


def weights(logits: Tensor) -> Tensor:
    return torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=logits.dtype)


def check(model: PreTrainedModel) -> None:
    """Compare logits and gradients of all parameters except the head's, whose gradient comes from a loss.

    Attention across sequences would change them by more than 0.1.
    """
    expected = alone(model)
    head = model.get_output_embeddings()
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter is not head.weight}
    weighted = (expected * weights(expected)).sum()
    expected_gradients = torch.autograd.grad(weighted, list(parameters.values()), allow_unused=True)
    torch.testing.assert_close(in_one_row(model), expected, rtol=1e-4, atol=1e-4)
    for (name, parameter), gradient in zip(parameters.items(), expected_gradients, strict=True):
        if gradient is not None and name != "lm_head.bias":
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("family", PACKABLE)
def test_families_that_can_be_packed(family: str) -> None:
    model = model_of(PACKABLE[family])
    assert is_packable(model)
    check(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_read_padded_rows(family: str) -> None:
    """Bugs: a state, convolution or chunk continues from one sequence into the next; a soft-cap is lost."""
    model = model_of(OTHERS[family])
    assert not is_packable(model)
    check(model)


def test_factors_that_depend_on_positions_do_not_keep_a_model_from_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: longrope compares positions on meta up to transformers 5.17, so Phi-4-mini silently reads padded rows."""
    forward = Phi3RotaryEmbedding.forward

    def forward_of_5_17(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        if self.rope_type == "longrope":
            assert position_ids.max() >= 0
        return forward(self, x, position_ids)

    monkeypatch.setattr(Phi3RotaryEmbedding, "forward", forward_of_5_17)
    monkeypatch.setattr(packed_attention, "_tried", {})
    assert is_packable(model_of(PACKABLE["phi3, fused"]))


def test_a_trial_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an error in the trial itself makes a model slower without a warning."""

    def fails(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        raise RuntimeError("not on meta")

    monkeypatch.setattr(Phi3RotaryEmbedding, "forward", fails)
    monkeypatch.setattr(packed_attention, "_tried", {})
    with pytest.warns(UserWarning, match=r"Phi3ForCausalLM reads padded rows.*RuntimeError: not on meta"):
        assert not is_packable(model_of(PACKABLE["phi3, fused"]))


@pytest.mark.parametrize("family", ["mistral, window", "falcon-h1, states"])
def test_positions_are_those_that_the_model_reads(family: str) -> None:
    model = model_of((PACKABLE | OTHERS)[family])
    read: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: read.append(inputs[0].numel()))
    ids, packing = nn.utils.rnn.pad_sequence(sequences(), batch_first=True), packing_of(*LENGTHS)
    source = HiddenStateModel(model, key="student.model")

    source(ids, packing)

    assert source.num_positions(packing) == sum(read)


def test_layers_that_are_run_again_attend_within_sequences_too() -> None:
    """Bug: the backward pass recomputes a layer after its attention was restored."""
    model = model_of(PACKABLE["mistral, window"])
    checkpoint_activations(model)
    model.train()
    check(model)


def test_attention_that_is_not_transformers_default_is_left() -> None:
    model = model_of(FAMILIES["qwen2, biases"], _attn_implementation="eager")
    assert not is_packable(model)


@pytest.mark.parametrize("family", ["mistral, window", "qwen2, biases"])
def test_flash_attention_of_a_package_is_given_the_bounds(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: the package's attention is replaced by PyTorch's, or does not get the sequences' bounds."""
    model, name = model_of(PACKABLE[family]), "flash_attention_2"
    expected = alone(model)
    calls: list[int] = []

    def flash(*arguments: Any, **bounds: Any) -> Any:
        calls.append(bounds["max_length_q"])
        return ALL_ATTENTION_FUNCTIONS["nemo_opd_packed"](*arguments, **bounds)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, name, flash)
    model.config._attn_implementation = name

    torch.testing.assert_close(in_one_row(model), expected, rtol=1e-4, atol=1e-4)
    assert calls == [max(LENGTHS)] * model.config.num_hidden_layers
    assert model.config._attn_implementation == name


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_flash_attention_is_asked_for_the_same(
    window: int | None, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches arguments with another meaning than torch documents (`window_size`: positions left and right)."""

    def documented(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, _: Tensor, *lengths: int, **options: Any) -> Tensor:
        assert lengths == (max(LENGTHS), max(LENGTHS))
        assert ends.dtype == torch.int32
        past, future = options["window_size"]
        output = torch.empty_like(q)
        for start, stop in zip(ends.tolist(), ends.tolist()[1:], strict=False):
            for i in range(start, stop):
                seen = slice(start if past < 0 else max(start, i - past), min(stop, i + future + 1))
                for h in range(q.shape[1]):
                    key_head = h * k.shape[1] // q.shape[1]
                    shares = (k[seen, key_head] @ q[i, h] * options["scale"]).softmax(0)
                    output[i, h] = shares @ v[seen, key_head]
        return output

    monkeypatch.setattr(packed_attention, "varlen_attn", documented)
    random = torch.Generator().manual_seed(3)
    num_tokens = sum(LENGTHS)
    query, key, value = (
        torch.randn(1, heads, num_tokens, 8, generator=random, dtype=torch.float64)
        for heads in (4, key_heads, key_heads)
    )
    ends = packing_of(*LENGTHS).bounds
    outputs = []
    for has_flash in (True, False):
        monkeypatch.setattr(packed_attention, "_has_flash", lambda *_, answer=has_flash: answer)
        outputs.append(attended(query, key, value, ends, max(LENGTHS), 0.3, window))
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)


def attended(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    bounds = {"cu_seq_lens_q": ends, "max_length_q": longest}
    attend = packed_attention._within_sequences
    return attend(torch.nn.Module(), query, key, value, None, **bounds, scaling=scale, sliding_window=window)[0]


@pytest.fixture
def fresh() -> Iterator[None]:
    """Clear the compiled graphs."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["qwen3, norms of heads", "mistral, window"])
def test_layers_with_flash_attention_are_compiled_once(
    family: str, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    """Bug: a new graph for each number of tokens or sequences, or for each longest length.

    Layers are traced in full with torch's operator; on meta only its shapes are computed.
    """
    monkeypatch.setattr(packed_attention, "_has_flash", lambda *_: True)
    model = model_of(PACKABLE[family]).to("meta")
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True, dynamic=True)
    for lengths in ((4, 2), LENGTHS, (3,), (100, 50, 1), (5,) * 6):
        ids = torch.zeros(1, sum(lengths), dtype=torch.int64, device="meta")
        bounds = packed_attention.bounds(packing_of(*lengths).bounds.to("meta"), longest=max(lengths))
        with packed_attention.packed_attention(model):
            output = model.model(input_ids=ids, position_ids=ids, use_cache=False, **bounds)
        assert output.last_hidden_state.shape == (1, sum(lengths), 16)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lengths", [LENGTHS, (1, 1, 1)])
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_flash_attention_of_a_gpu_is_that_by_length(
    key_heads: int, window: int | None, lengths: tuple[int, ...]
) -> None:
    """Catches a wrong result of the kernel, forward or backward, against one call of SDPA for each length."""
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    torch.manual_seed(0)
    # Rounded first: rounding of inputs is not an error of the kernel.
    shapes = [(1, heads, sum(lengths), 16) for heads in (4, key_heads, key_heads)]
    inputs = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    outputs = []
    for dtype in (torch.bfloat16, torch.float32):  # only the first is the kernel's
        query, key, value = (tensor.detach().to(dtype).requires_grad_() for tensor in inputs)
        assert packed_attention._has_flash(query, value, 0.0) == (dtype is torch.bfloat16)
        output = attended(query, key, value, ends, max(lengths), 0.25, window)
        output.float().square().sum().backward()
        outputs.append([output, query.grad, key.grad, value.grad])
    for ours, reference in zip(*outputs, strict=True):
        torch.testing.assert_close(ours.float(), reference, rtol=0.03, atol=0.03)
