"""Rewriting of a model's safetensors files with new rows for its tokens, one file at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from nemo_opd.errors import ModelError
from nemo_opd.models.quantised import quantisation
from nemo_opd.models.stored_weights import NotPiecewiseError, find_pieces, weight_files
from nemo_opd.models.text_part import text_name
from nemo_opd.progress import tracked


class _Renew(Protocol):
    """Function from a parameter's name and old value to its new value."""

    def __call__(self, parameter: str, old: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class VocabularyWeights:
    """Names of the model's parameters with a row for each token."""

    embeddings: str
    head: str
    bias: str | None
    is_tied: bool
    """Whether the head shares the embeddings' weight, unless the files store a separate one."""

    def __contains__(self, parameter: str) -> bool:
        return parameter in (self.embeddings, self.head, self.bias)


def vocabulary_weights(model: PreTrainedModel, reference: str, *, key: str) -> VocabularyWeights:
    """Find the parameters with a row for each token. model: on meta.

    Raises ModelError, naming `key`, if the head is not one linear layer or the model has additional token embeddings.
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embeddings, nn.Embedding) or not isinstance(head, nn.Linear):
        raise ModelError(
            f"{key}={reference}: {type(model).__name__} reads tokens with a {type(embeddings).__name__} and predicts "
            f"them with a {type(head).__name__}; a transplant needs one embedding matrix and one linear head, so name "
            "another model"
        )
    names = {id(module): name for name, module in model.named_modules()}
    config: Any = model.config.get_text_config()
    tables = {config.vocab_size, getattr(config, "vocab_size_per_layer_input", None)}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module is not embeddings and module.num_embeddings in tables:
            raise ModelError(
                f"{key}={reference}: {names[id(module)]} is a second matrix of {type(model).__name__} with a row for "
                "each token; a transplant supports embeddings and head only, so name another model"
            )
    return VocabularyWeights(
        embeddings=f"{names[id(embeddings)]}.weight",
        head=f"{names[id(head)]}.weight",
        bias=None if head.bias is None else f"{names[id(head)]}.bias",
        is_tied=f"{names[id(head)]}.weight" in model.all_tied_weights_keys,
    )


def rewrite(
    model: PreTrainedModel, reference: str, folder: Path, weights: VocabularyWeights, renew: _Renew
) -> list[str]:
    """Write the weights into `folder`, with `renew` applied to the vocabulary's; return the names of omitted tensors.

    Tensors that the model on meta does not have are omitted, for example all but the text part of a multimodal
    checkpoint. File names and dtypes stay the same. Holds one file's tensors at a time. Raises ModelError if the
    weights are not plain safetensors.
    """
    try:
        pieces = find_pieces(model, reference, key="--model")
        files = weight_files(reference)
    except NotPiecewiseError:
        method = quantisation(model.config)
        problem = "no safetensors files" if method is None else f"quantised weights ({method})"
        raise ModelError(
            f"--model={reference}: it has {problem}, which cannot be rewritten tensor by tensor; save the plain "
            "weights with save_pretrained and name that folder"
        ) from None
    owners = {(piece.stored.file, piece.stored.name): name for name, parts in pieces.items() for piece in parts}
    left_out: list[str] = []
    places: dict[str, str] = {}
    num_bytes = 0
    for file in tracked(files, "rewriting the weights", "files"):
        tensors: dict[str, Tensor] = {}
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                if (owner := owners.get((file, name))) is None:
                    left_out.append(name)
                    continue
                value = opened.get_tensor(name)
                tensors[text_name(name)] = (renew(owner, value) if owner in weights else value).contiguous()
        if tensors:
            save_file(tensors, folder / file.name, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, file.name)
            num_bytes += sum(value.nbytes for value in tensors.values())
    if set(places.values()) != {SAFE_WEIGHTS_NAME}:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return left_out
