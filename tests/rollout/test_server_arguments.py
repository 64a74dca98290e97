"""What servers are started with."""

from collections.abc import Callable

import pytest

from nemo_opd.rollout.server.program import Launch
from nemo_opd.rollout.server.sglang import SGLang
from nemo_opd.rollout.server.vllm import VLLM


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (SGLang().arguments, ["--enable-fp32-lm-head"]),
        (VLLM().arguments, ["--hf-overrides", '{"head_dtype": "float32"}']),
    ],
    ids=["sglang", "vllm"],
)
def test_logits_are_rounded_where_the_trainers_are(arguments: Callable[[Launch], list[str]], option: list[str]) -> None:
    """Bug: one of two that are compared rounds, which is worse than if both do."""
    rounded, whole = (arguments(Launch("m", "bfloat16", None, 1, fp32_logits=fp32)) for fp32 in (False, True))
    assert [each for each in whole if each not in rounded] == option
    assert [each for each in whole if each in rounded] == rounded
