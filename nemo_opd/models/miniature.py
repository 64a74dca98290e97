"""Small random models with another model's architecture, to test how its tokens depend on each other."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCABULARY = 256
"""Maximum vocabulary size of a miniature."""
FIRST_ORDINARY = 16
"""First id that is not a special token in a miniature."""
_FACTORS = (32, 16, 8, 4, 2, 1)
"""Divisors of all widths, tried in turn."""
_NARROWEST = 16
"""Minimum width of hidden states; a norm over very few numbers leaves no information."""
_LAYERS = 8
"""Maximum layers of a miniature: the longest period of repeating kinds of layers in any model family."""
_WINDOW = 8
"""Maximum tokens of windows and chunks, so that a short text has several."""
_MAX_PARAMETERS = 30_000_000
_MATRIX_STD, _VECTOR_STD = 1.0, 0.2
"""Standard deviations: of a matrix's product with a unit vector, and of vectors around their initial values."""

_SPECIAL = re.compile(r"_(id|ids|index)$")
_DEPTH = re.compile(r"^(num_hidden_layers|(num_)?(decoder_|encoder_)?layers|n_layers?)$")
_WINDOWS = re.compile(r"window(_size|_len)?$|^local_attention$|chunk_size$")
_EXPERTS = re.compile(r"^(n_routed|num_local|moe_num|num)_experts$")
_EXPERTS_PER_TOKEN = re.compile(r"experts_per_tok(en)?$|^(moe_k|moe_topk|moe_top_k|top_k_experts)$")
_GROUPS = re.compile(r"^(n_group|num_expert_group)$")
_COUNTS = re.compile(
    r"(^|_)(num|n)_(?!embd)|ngroups|layers?$|(^|_)heads|experts?$|top_?k|groups?$|position|length|seq_len|max_|ctx"
    r"|window|chunk|block|kernel|conv|cycles|interval|period|offset|freq|floor|scal|bucket|expan|seed|extent|patch"
    r"|pattern|limit"
)
"""Names of numbers other than widths."""


def miniatures(config: PretrainedConfig, seed: int) -> Iterator[PreTrainedModel]:
    """Yield models with the class and kinds of layers in `config`, on the CPU in fp32, narrowest first.

    Skips sizes that do not fit together, so it may yield none. A miniature that can be built may still fail when it is
    called; then try the next. All widths are divided by the same number and head counts stay, so that products and sums
    of widths fit as in the original.
    """
    values = config.to_dict()
    for name in ("quantization_config", "dtype", "torch_dtype"):
        values.pop(name, None)
    width = getattr(config.get_text_config(), "hidden_size", None) or _NARROWEST * _FACTORS[0]
    factors = [factor for factor in _FACTORS if factor == 1 or width // factor >= _NARROWEST]
    for layers in (_LAYERS, None):
        for factor in factors:
            try:
                yield _build(type(config), values, factor, layers, seed)
            except Exception:  # architectures raise their own errors for sizes that do not fit
                continue


def _build(
    config_class: type[PretrainedConfig], values: Mapping[str, Any], factor: int, layers: int | None, seed: int
) -> PreTrainedModel:
    """Build a miniature. Raises ValueError if it is too large; the architecture may raise its own errors."""
    scale = _Scale(values, factor, layers)
    with torch.device("meta"):
        on_meta = AutoModelForCausalLM.from_config(config_class.from_dict(scale.dictionary(values)))
    if sum(parameter.numel() for parameter in on_meta.parameters()) > _MAX_PARAMETERS:
        raise ValueError("too large")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would also seed GPUs
        config = config_class.from_dict(scale.dictionary(values))  # again, since models change their configuration
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Weights that are initialised to zero would hide dependencies.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=_MATRIX_STD / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=_VECTOR_STD)
    return model.eval()


class _Scale:
    """Reduction of a configuration's numbers, according to their names."""

    def __init__(self, values: Mapping[str, Any], factor: int, layers: int | None) -> None:
        """layers: maximum number of layers; by default all."""
        self._factor, self._layers = factor, layers
        numbers = {name: value for name, value in values.items() if type(value) is int}
        self._depth = max((n for name, n in numbers.items() if _DEPTH.search(name)), default=0)
        experts_per_token, groups = (
            max((n for name, n in numbers.items() if pattern.search(name)), default=1)
            for pattern in (_EXPERTS_PER_TOKEN, _GROUPS)
        )
        self._experts = groups * max(2, experts_per_token)

    def dictionary(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy with reduced numbers."""
        return {name: self._value(name, value) for name, value in values.items()}

    def _value(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return self.dictionary(value)
        if isinstance(value, list):
            return self._list(name, value)
        return self._number(name, value) if type(value) is int else value

    def _number(self, name: str, value: int) -> int:
        if _SPECIAL.search(name):
            return value % FIRST_ORDINARY
        if "vocab" in name:
            return min(value, VOCABULARY)
        if _DEPTH.search(name):
            return min(value, self._layers or value)
        if _EXPERTS.search(name):
            return min(value, self._experts)
        if _WINDOWS.search(name):
            return min(value, _WINDOW)
        is_width = not _COUNTS.search(name) and value % self._factor == 0
        return value // self._factor if is_width and value > self._factor else value

    def _list(self, name: str, value: list[Any]) -> list[Any]:
        if name in ("short_factor", "long_factor"):  # one for each pair of a head's dimensions
            return value[: len(value) // self._factor]
        if self._layers is not None and len(value) == self._depth:
            value = value[: self._layers]
        return [self._value(name, item) for item in value]
