"""Trials, on miniatures of a model, of how its tokens depend on each other."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from nemo_opd.errors import ModelError
from nemo_opd.models.miniature import FIRST_ORDINARY, VOCABULARY, miniatures

_LENGTH = 23
"""Length of a trial's text: not a multiple of any chunk size."""
_SHORT, _NEW = 6, 4
"""Number of tokens of the shorter prompt, and of new tokens."""
_NEGLIGIBLE = torch.finfo(torch.float32).eps ** 0.5
"""Maximum relative difference that counts as rounding: the geometric mean of a rounding error and 1."""
_SEEDS = (0, 1, 2)
"""Seeds of miniatures that must agree: in a single one, rounding may send a token to another expert."""


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
        min(FIRST_ORDINARY, vocabulary // 2), vocabulary - 1, (1, min(length, longest)), generator=generator
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
