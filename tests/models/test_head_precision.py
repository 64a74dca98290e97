"""A head whose precision differs from its model's is refused before anything runs."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nemo_opd.errors import ModelError
from nemo_opd.models.causal_model import check_head_precision, dtype_before
from tests.models.families import FAMILIES, SIZES


class KeepingHead(LlamaForCausalLM):
    _keep_in_fp32_modules_strict = ("lm_head",)


class KeepingHeadFromFP16(LlamaForCausalLM):
    _keep_in_fp32_modules = ("lm_head",)


class KeepingNorms(LlamaForCausalLM):
    _keep_in_fp32_modules_strict = ("norm",)


class UpcastingHidden(LlamaForCausalLM):
    """A model whose head computes in fp32 whatever the layers' precision."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lm_head.register_forward_pre_hook(lambda _, hidden: hidden[0].float())


def check(kind: type[LlamaForCausalLM], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", lambda config, dtype: kind(config).to(dtype))
    check_head_precision(LlamaConfig(**SIZES), dtype, key="teachers.1", reference="some/model")


@pytest.mark.parametrize(
    ("kind", "dtype", "reason"),
    [
        (KeepingHead, torch.bfloat16, "its head is kept in float32"),
        (KeepingHead, torch.float16, "its head is kept in float32"),
        (KeepingHeadFromFP16, torch.float16, "its head is kept in float32"),
        (UpcastingHidden, torch.bfloat16, "its head reads hidden states in float32"),
    ],
)
def test_a_head_in_fp32_is_refused(
    kind: type[LlamaForCausalLM], dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: FSDP2 silently rounds the head; an error without a key at the first step."""
    with pytest.raises(ModelError, match=rf"teachers.1.model=some/model: {reason} .*teachers.1.dtype=float32"):
        check(kind, dtype, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (KeepingHead, torch.float32),
        (UpcastingHidden, torch.float32),
        (KeepingHeadFromFP16, torch.bfloat16),
        (KeepingNorms, torch.bfloat16),
    ],
)
def test_what_does_not_touch_the_head_passes(
    kind: type[LlamaForCausalLM], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(kind, dtype, monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_pass(family: str) -> None:
    check_head_precision(FAMILIES[family], torch.bfloat16, key="student", reference=family)


def test_heads_are_looked_at_in_every_family() -> None:
    """Bug: the check passes every model because a model's own code does not run on meta."""
    for config in FAMILIES.values():
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.bfloat16)
        assert dtype_before(model, model.get_output_embeddings()) == torch.bfloat16
