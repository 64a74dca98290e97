"""A model with its tokenizer, before it is loaded."""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from nemo_opd.alignment import Pieces, pieces_of
from nemo_opd.alignment.pieces import HOLE
from nemo_opd.config.model import Student
from nemo_opd.config.teacher import Teacher
from nemo_opd.errors import AlignmentError, ModelError
from nemo_opd.models.load import build_on_meta, load_config, tokenizer_of
from nemo_opd.models.lora import Adapters
from nemo_opd.models.parallelize import check_parallelism
from nemo_opd.models.sharded_load import check_weights
from nemo_opd.rollout.hf import max_positions
from nemo_opd.training.memory import ModelSize, size_of


@dataclass(frozen=True, slots=True)
class Side:
    size: ModelSize
    tokenizer: PreTrainedTokenizerFast
    pieces: Pieces
    vocab_size: int
    """Ids that the tokenizer has and the model can read."""
    positions: int | None = None
    """Tokens of the longest sequence that the model is made for; None where its configuration names no limit."""
    has_rotary_positions: bool = False
    """It computes on beyond its positions, if not well; a table of positions has no more rows."""


def load_side(settings: Student | Teacher, key: str, device: str) -> Side:
    """Raises ModelError where the model or its tokenizer is not readable, the two do not belong together, or the model
    cannot be cut as its `parallelism` says.
    """
    config = load_config(settings.model, key=f"{key}.model")
    check_parallelism(config, settings.parallelism, device, key=key)
    lora = settings.lora if isinstance(settings, Student) else None
    adapters = None if lora is None else Adapters(lora, settings.model, seed=0)
    model = build_on_meta(config, settings.model, key=f"{key}.model")
    check_weights(model, settings.model, key=f"{key}.model")
    size = size_of(model, adapters)
    if not size.layers:
        raise ModelError(f"{key}.model={settings.model}: its config.json says 0 layers; copy the file there again")
    tokenizer = tokenizer_of(settings, key=key)
    name, source = settings.tokenizer_source
    try:
        pieces = pieces_of(tokenizer)
    except AlignmentError as error:
        raise ModelError(f"{key}.{name}={source}: {error}") from error
    # Special tokens may go beyond: Gemma-3-1B has the tokenizer of its siblings that see, without their image token.
    beyond = slice(size.vocab_size, None)
    if not np.all(pieces.is_special[beyond] | (pieces.origin[beyond] == HOLE)):
        raise ModelError(
            f"{key}.{name}={source}: its tokenizer has ids up to {pieces.vocab_size - 1}, but {settings.model} has "
            f"{size.vocab_size} token embeddings; name the tokenizer of the model as {key}.tokenizer"
        )
    rotary = getattr(config.get_text_config(), "rope_parameters", None)
    return Side(
        size,
        tokenizer,
        pieces,
        min(pieces.vocab_size, size.vocab_size),
        positions=max_positions(config),
        has_rotary_positions=bool(rotary),
    )
