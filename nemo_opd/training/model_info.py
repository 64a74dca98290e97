"""A model and its tokenizer, read before the weights are loaded."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from nemo_opd.alignment import Pieces, pieces_of
from nemo_opd.alignment.pieces import HOLE
from nemo_opd.config.model import Student
from nemo_opd.config.teacher import CrossTokenizerTeacher, Teacher
from nemo_opd.errors import AlignmentError, ModelError
from nemo_opd.models.fused_layers import check_fused_layers
from nemo_opd.models.load import build_on_meta, load_config, tokenizer_of
from nemo_opd.models.lora import Adapters
from nemo_opd.models.parallelize import check_parallelism
from nemo_opd.models.stored_weights import check_weights
from nemo_opd.models.token_trials import require_causal
from nemo_opd.rollout.hf import max_positions
from nemo_opd.rotary import RotaryLimit, rotary_limit
from nemo_opd.served.agreement import TEXTS
from nemo_opd.served.check import check_endpoint
from nemo_opd.teacher_cache.manifest import read_manifest
from nemo_opd.training.model_size import ModelSize, size_of

_NO_LIMIT = 1 << 30
"""Tokens; longer than any text."""
_FLASH = {
    "flash_attention_2": (is_flash_attn_2_available, "flash-attn"),
    "flash_attention_3": (is_flash_attn_3_available, "flash-attn-3"),
}
"""Attention implementation → function that tells whether its package is installed, and the package."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Size, tokenizer and limits of a model."""

    size: ModelSize
    tokenizer: PreTrainedTokenizerFast
    pieces: Pieces
    vocab_size: int
    """Number of ids that both the tokenizer and the model have."""
    positions: int | None = None
    """Longest sequence of the model in tokens; None if its configuration sets no limit."""
    has_rotary_positions: bool = False
    """Whether the model still runs beyond `positions`, with poor predictions; learned positions end there."""
    rotary: RotaryLimit | None = None
    """Limit of rotary factors that depend on the longest text of a forward pass."""

    @property
    def computed_size(self) -> ModelSize:
        """Size of the model with a head of `vocab_size` rows, the ones that losses compute logits of."""
        return replace(self.size, vocab_size=self.vocab_size)

    def ids_missing_in(self, other: "ModelInfo") -> NDArray[np.int64]:
        """Return the ids that the other tokenizer does not have, or the other model has no embedding for."""
        in_other = np.zeros(self.vocab_size, np.bool_)
        common = min(self.vocab_size, other.vocab_size)
        in_other[:common] = other.pieces.origin[:common] != HOLE
        return np.flatnonzero((self.pieces.origin[: self.vocab_size] != HOLE) & ~in_other)

    def longest_text(self, settings: Teacher) -> int:
        """Return the most tokens that a teacher reads of a text."""
        max_length = settings.max_length if isinstance(settings, CrossTokenizerTeacher) else None
        return max_length or self.positions or _NO_LIMIT


def read_model_info(settings: Student | Teacher, key: str, device: str) -> ModelInfo:
    """Read a model's configuration and tokenizer; of a served teacher, its tokenizer and its servers' limits.

    Raises ModelError if one of them cannot be read, they do not belong together, the model is not causal, or
    `parallelism`, `attn_implementation` or `fused_layers` does not fit; EndpointError as `check_endpoint` does.
    """
    if not has_configuration(settings):
        return _tokenizer_and_limit(settings, key)
    config = load_config(settings.reference, key=f"{key}.model")
    check_parallelism(config, settings.parallelism, device, key=f"{key}.parallelism")
    lora = settings.lora if isinstance(settings, Student) else None
    adapters = None if lora is None else Adapters(lora, settings.reference, seed=0)
    _check_attention(settings, key, device)
    model = build_on_meta(
        config, settings.reference, key=f"{key}.model", attn_implementation=settings.attn_implementation
    )
    require_causal(config, settings.reference, key=f"{key}.model")
    if isinstance(settings, Student) or settings.is_computed:
        check_fused_layers(model, settings.fused_layers, device, key=key)
        check_weights(model, settings.reference, key=f"{key}.model")
    size = size_of(model, adapters)
    if not size.layers:
        raise ModelError(f"{key}.model={settings.reference}: its config.json says 0 layers; copy the file there again")
    tokenizer, pieces = _read_tokenizer(settings, key)
    name, source = settings.tokenizer_source
    # Special tokens need no embedding: Gemma-3-1B shares its tokenizer, with its image token, with multimodal models.
    no_embedding = slice(size.vocab_size, None)
    if not np.all(pieces.is_special[no_embedding] | (pieces.origin[no_embedding] == HOLE)):
        raise ModelError(
            f"{key}.{name}={source}: its tokenizer has ids up to {pieces.vocab_size - 1}, but {settings.reference} has "
            f"{size.vocab_size} token embeddings; set {key}.tokenizer to the model's tokenizer"
        )
    text = config.get_text_config()
    return ModelInfo(
        size,
        tokenizer,
        pieces,
        min(pieces.vocab_size, size.vocab_size),
        positions=max_positions(config),
        has_rotary_positions=bool(getattr(text, "rope_parameters", None)),
        rotary=rotary_limit(text.to_dict()),
    )


def has_configuration(settings: Student | Teacher) -> bool:
    """Return whether the model's configuration can be read: not for servers and caches of their answers."""
    if isinstance(settings, Student) or settings.is_computed:
        return True
    return settings.cache is not None and not read_manifest(settings.cache).is_served


def tokenizer_info(settings: Teacher, key: str) -> ModelInfo:
    """Read the tokenizer of a teacher without a configuration, whose model is assumed to have all of its ids.

    Raises ModelError if it cannot be read.
    """
    try:
        tokenizer, pieces = _read_tokenizer(settings, key)
    except ModelError as error:
        if settings.cache is not None or settings.tokenizer is not None:
            raise
        raise ModelError(
            f"{error}; if only the servers use the name {settings.reference}, set {key}.tokenizer to the folder or "
            "hub name of its tokenizer"
        ) from error
    size = ModelSize(pieces.vocab_size, hidden_size=0, layers=(), rest=(), has_soft_cap=False)
    return ModelInfo(size, tokenizer, pieces, pieces.vocab_size)


def _tokenizer_and_limit(settings: Student | Teacher, key: str) -> ModelInfo:
    assert not isinstance(settings, Student)
    info = tokenizer_info(settings, key)
    if settings.served is None:
        assert settings.cache is not None
        return replace(info, positions=read_manifest(settings.cache).positions)
    ordinary = np.flatnonzero(~info.pieces.is_special & (info.pieces.origin != HOLE))
    limit = check_endpoint(
        settings.served,
        settings.reference,
        key=key,
        vocab_size=info.vocab_size,
        token=int(ordinary[-1]),
        texts=[info.tokenizer(text)["input_ids"] for text in TEXTS],
    )
    return replace(info, positions=limit)


def _read_tokenizer(settings: Student | Teacher, key: str) -> tuple[PreTrainedTokenizerFast, Pieces]:
    tokenizer = tokenizer_of(settings, key=key)
    name, source = settings.tokenizer_source
    try:
        return tokenizer, pieces_of(tokenizer)
    except AlignmentError as error:
        raise ModelError(f"{key}.{name}={source}: {error}") from error


def _check_attention(settings: Student | Teacher, key: str, device: str) -> None:
    """Raise ModelError for flash attention that the device, the dtype or a missing package rules out."""
    name = settings.attn_implementation
    if name not in _FLASH:
        return
    is_installed, package = _FLASH[name]
    if device == "cpu":
        reason = f"it needs a GPU, and cluster.device is {device}"
    elif settings.dtype == "float32":
        reason = f"it supports only bfloat16 and float16, and {key}.dtype is float32"
    elif not is_installed():
        reason = f"the package {package} is not installed"
    else:
        return
    raise ModelError(f"{key}.attn_implementation={name}: {reason}; leave it out to use PyTorch's attention")
