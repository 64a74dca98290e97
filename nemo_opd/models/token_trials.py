"""Trials, on miniatures of a model, of how its tokens depend on each other."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from nemo_opd.errors import ModelError

_LENGTH = 23
"""Length of a trial's text: not a multiple of any chunk size."""
_SHORT, _NEW = 6, 4
"""Number of tokens of the shorter prompt, and of new tokens."""
_NEGLIGIBLE = torch.finfo(torch.float32).eps ** 0.5
"""Maximum relative difference that counts as rounding: the geometric mean of a rounding error and 1."""
_SEEDS = (0, 1, 2)
"""Seeds of miniatures that must agree: in a single one, rounding may send a token to another expert."""
VOCABULARY = 256
"""Maximum vocabulary size of a miniature."""
_FIRST_ORDINARY = 16
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


def require_causal(config: PretrainedConfig, reference: str, *, key: str) -> None:
    """Raise ModelError, naming `key`, for a model whose logits depend on later tokens.

    Random weights show this, since it depends only on architecture and settings; a model that cannot be tried passes.
    """
    if _verdict(_ConfigKey.of(config), _sees_later_tokens, if_untried=False):
        raise ModelError(
            f"{key}={reference}: {type(config).__name__.removesuffix('Config')} as its config.json says reads tokens "
            "that come after the one it predicts, so that its predictions of a given text mean nothing; name a causal "
            "language model, or set in config.json what makes this one causal (is_decoder: true, or "
            "use_bidirectional_attention: false) if it was trained so"
        )


def batching(config: PretrainedConfig) -> Literal["any", "equal_lengths", "alone"]:
    """Return which left-padded prompts a model can continue in one batch with the same result as one at a time.

    For a model that cannot be tried, return `alone`.
    """
    config_key = _ConfigKey.of(config)
    if not _verdict(config_key, _differs_beside_longer, if_untried=True):
        return "any"
    return "alone" if _verdict(config_key, _differs_beside_equal, if_untried=True) else "equal_lengths"


@dataclass(frozen=True)
class _ConfigKey:
    """Hashable wrapper of a configuration, compared by its text."""

    text: str
    config: PretrainedConfig = field(compare=False)

    @classmethod
    def of(cls, config: PretrainedConfig) -> "_ConfigKey":
        return cls(f"{type(config).__name__} {config.to_json_string(use_diff=False)}", config)


@lru_cache
def _verdict(config_key: _ConfigKey, trial: Callable[[PreTrainedModel], bool], *, if_untried: bool) -> bool:
    """Return whether a trial is positive with every seed; `if_untried` if no miniature can be tried."""
    for seed in _SEEDS:
        result = _first_result(config_key.config, trial, seed)
        if result is None:
            return if_untried
        if not result:
            return False
    return True


@torch.no_grad()
def _first_result(config: PretrainedConfig, trial: Callable[[PreTrainedModel], bool], seed: int) -> bool | None:
    """Return the result of the first miniature that can be tried; None if none can."""
    for model in miniatures(config, seed):
        try:
            return trial(model)
        except Exception:  # architectures raise their own errors for sizes that do not fit
            continue
    return None


def _sees_later_tokens(model: PreTrainedModel) -> bool:
    """Return whether logits change if later tokens do. Raises ValueError for logits that are not finite."""
    ids = _text(model, _LENGTH)
    logits = _logits(model, ids)
    for position in (ids.shape[1] // 2, ids.shape[1] - 1):
        changed = ids.clone()
        changed[:, position:] = ids[:, position:].flip(1) + 1
        difference = (_logits(model, changed) - logits).abs()
        if difference[:, :position].max() > _NEGLIGIBLE * difference.max():
            return True
    return False


def _differs_beside_longer(model: PreTrainedModel) -> bool:
    """Return whether a short prompt and a longer one are continued differently in one batch than alone."""
    (longer,) = _text(model, _LENGTH - _NEW)
    return _differs(model, [longer[-_SHORT:], longer])


def _differs_beside_equal(model: PreTrainedModel) -> bool:
    """Return whether prompts of equal length are continued differently in one batch than alone, as with RWKV."""
    (text,) = _text(model, _LENGTH - _NEW)
    return _differs(model, [text[:_SHORT], text[-_SHORT:]])


def _differs(model: PreTrainedModel, prompts: list[Tensor]) -> bool:
    alone = torch.cat([_continued(model, [prompt]) for prompt in prompts])
    difference = (_continued(model, prompts) - alone).abs().max()
    return bool(difference > _NEGLIGIBLE * alone.abs().max())


def _text(model: PreTrainedModel, length: int) -> Tensor:
    """Return random ids [1, length], or as many as the model reads, all below the last id of the vocabulary."""
    config: Any = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or 0
    longest = limit if limit > 0 else length  # XLNet's limit is -1
    vocabulary = min(VOCABULARY, config.vocab_size)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(
        min(_FIRST_ORDINARY, vocabulary // 2), vocabulary - 1, (1, min(length, longest)), generator=generator
    )


def _logits(model: Any, ids: Tensor) -> Tensor:
    return _finite(model(input_ids=ids, use_cache=False).logits)


def _continued(model: Any, prompts: list[Tensor]) -> Tensor:
    """Continue prompts greedily, and return the logits of each new token [B, new, V]."""
    settings = GenerationConfig(
        max_new_tokens=_NEW,
        do_sample=False,
        use_cache=True,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    masks = [torch.ones_like(prompt) for prompt in prompts]
    ids, mask = (pad_sequence(rows, batch_first=True, padding_side="left") for rows in (prompts, masks))
    model.generation_config = settings
    output = model.generate(ids, attention_mask=mask, generation_config=settings)
    return _finite(torch.stack(output.logits, 1))


def _finite(logits: Tensor) -> Tensor:
    """Return the logits. Raises ValueError unless they are finite."""
    if not logits.isfinite().all():
        raise ValueError("logits are not finite")
    return logits


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
            return value % _FIRST_ORDINARY
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
