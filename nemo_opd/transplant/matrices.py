"""Embedding and head rows for a new vocabulary: the map from old rows, and the rewritten weights (methods.md §2.9)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from nemo_opd.alignment import RoleOverrides
from nemo_opd.alignment.pieces import HOLE
from nemo_opd.errors import ModelError
from nemo_opd.models.load import text_name
from nemo_opd.models.quantised import quantisation
from nemo_opd.models.stored_weights import NotPiecewiseError, find_pieces, weight_files
from nemo_opd.progress import tracked
from nemo_opd.projection.exact import Side, exact_pass, read_pair
from nemo_opd.projection.retokenization import spell_with

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Weighting = Literal["uniform", "bytes", "first", "last"]
"""Weights of the old tokens that spell a new one: equal, proportional to their bytes, or (up to normalization) 1, 0.1,
0.01, … from the first or from the last.
"""
UNUSED, UNREACHED, SUMMED, ROLE, EXACT = range(5)
"""Kinds of rows: an id without a token; a token that old tokens cannot spell; a token spelled by several; a special
token with the role of an old one; a token with the bytes of an old one.
"""
_DECAY = 0.1
_BLOCK_CELLS = 2**23
"""Elements processed at a time in float64: 64 MiB."""


@dataclass(frozen=True, slots=True, eq=False)
class RowMap:
    """R [V, W], sparse and row-stochastic: rows of the new vocabulary as combinations of old rows."""

    starts: NDArray[np.int64]
    """[V + 1]: row v has the entries starts[v] to starts[v + 1], none if it is unused or unreached."""
    columns: NDArray[np.int64]
    """[N]: old ids; an id may occur twice in a row."""
    weights: NDArray[np.float64]
    """[N]: sums to 1 in each row with entries."""
    kinds: NDArray[np.uint8]
    """[V]: kind of each row."""
    old_tokens: NDArray[np.int64]
    """Ascending old ids that are tokens and have a row; means and deviations are computed over them."""

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def copied(self) -> NDArray[np.int64]:
        """New ids with one entry, whose rows are exact copies of old rows."""
        return np.flatnonzero(np.diff(self.starts) == 1)


def build_row_map(
    new_tokenizer: PreTrainedTokenizerBase,
    old_tokenizer: PreTrainedTokenizerBase,
    num_old_rows: int,
    *,
    weighting: Weighting = "bytes",
    roles: RoleOverrides | None = None,
) -> RowMap:
    """Map each new id to the old token with its bytes or role, or else to the old tokens that spell its bytes.

    num_old_rows: rows of the model's matrices. A new token that needs an old token beyond them, which the model cannot
    read, counts as unreached. Raises AlignmentError if the tokenizers' pieces cannot be exact.
    """
    pair = read_pair(new_tokenizer, old_tokenizer, roles)
    new, old = pair.student, pair.teacher
    exact = exact_pass(pair)
    partner = exact.indices[:, 0].astype(np.int64)
    kinds = np.where(new.pieces.origin == HOLE, UNUSED, UNREACHED).astype(np.uint8)
    kinds[partner >= 0] = EXACT
    kinds[list(pair.special.best)] = ROLE
    rows = np.flatnonzero(partner >= 0)
    columns, weights = partner[rows], np.ones(len(rows))

    missing = np.flatnonzero(new.is_text & (partner < 0) & (kinds == UNREACHED))
    spelled = spell_with(old, [new.contents[i] for i in missing.tolist()])
    kinds[missing[np.unique(spelled.content)]] = SUMMED
    shares = _shares(spelled.content, spelled.place, old.pieces.lengths[spelled.ids], weighting)
    rows = np.concatenate([rows, missing[spelled.content]])
    columns, weights = np.concatenate([columns, spelled.ids]), np.concatenate([weights, shares])

    unreadable = np.unique(rows[columns >= num_old_rows])
    kinds[unreadable] = UNREACHED
    is_readable = ~np.isin(rows, unreadable)
    order = np.argsort(rows[is_readable], kind="stable")
    counts = np.bincount(rows[is_readable], minlength=len(kinds))
    return RowMap(
        starts=np.concatenate([[0], np.cumsum(counts)]),
        columns=columns[is_readable][order],
        weights=weights[is_readable][order],
        kinds=kinds,
        old_tokens=_tokens(old, num_old_rows),
    )


def _shares(
    content: NDArray[np.int64], place: NDArray[np.int64], num_bytes: NDArray[np.int32], weighting: Weighting
) -> NDArray[np.float64]:
    """Return the weight of each old token, normalized per content. place: index of the token in its content."""
    if not len(content):
        return np.zeros(0)
    counts = np.bincount(content)
    match weighting:
        case "uniform":
            raw = np.ones(len(content))
        case "bytes":
            raw = num_bytes.astype(np.float64)
        case "first":
            raw = _DECAY ** place.astype(np.float64)
        case "last":
            raw = _DECAY ** (counts[content] - 1 - place).astype(np.float64)
    return raw / np.bincount(content, raw)[content]


def _tokens(side: Side, num_rows: int) -> NDArray[np.int64]:
    ids = np.flatnonzero(side.pieces.origin != HOLE)
    return ids[ids < num_rows]


def mapped(old: Tensor, rows: RowMap, num_rows: int) -> Tensor:
    """Return R·old [num_rows, …] in the dtype of `old` [W or more, …], a matrix or a bias.

    Rows with one entry are exact copies of old rows; rows with more are summed in float64. Rows without entries, and
    padding rows beyond the new vocabulary, are the mean of the old tokens' rows.
    """
    new = old.new_empty(num_rows, *old.shape[1:])
    new[:] = _statistics(old, rows)[0].to(old.dtype)
    for begin, end in _blocks(rows, _width(old)):
        first, last = rows.starts[begin], rows.starts[end]
        counts = torch.from_numpy(np.diff(rows.starts[begin : end + 1]))
        place = torch.arange(end - begin).repeat_interleave(counts)
        weights = torch.from_numpy(rows.weights[first:last]).view(-1, *[1] * (old.dim() - 1))
        values = old[torch.from_numpy(rows.columns[first:last])].double() * weights
        sums = torch.zeros(end - begin, *old.shape[1:], dtype=torch.float64).index_add_(0, place, values)
        reached = counts > 0
        new[begin:end][reached] = sums[reached].to(old.dtype)
    # Copy instead of adding to 0, which would lose the sign of −0.
    copied = rows.copied
    new[torch.from_numpy(copied)] = old[torch.from_numpy(rows.columns[rows.starts[copied]])]
    return new


def drawn(old: Tensor, rows: RowMap, num_rows: int, seed: int) -> Tensor:
    """Draw rows [num_rows, …] from a normal with each dimension's mean and deviation over the old tokens' rows.

    The result has the dtype of `old`.
    """
    mean, deviation = _statistics(old, rows)
    generator = torch.Generator().manual_seed(seed)
    new = old.new_empty(num_rows, *old.shape[1:])
    size = max(1, _BLOCK_CELLS // _width(old))
    for begin in range(0, num_rows, size):
        block = new[begin : begin + size]
        noise = torch.randn(block.shape, generator=generator, dtype=torch.float64)
        block.copy_(mean + deviation * noise)
    return new


def _statistics(old: Tensor, rows: RowMap) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation over the old tokens' rows: float64, in the shape of a row."""
    total = torch.zeros(old.shape[1:], dtype=torch.float64)
    squares = torch.zeros_like(total)
    ids = torch.from_numpy(rows.old_tokens)
    parts = ids.split(max(1, _BLOCK_CELLS // _width(old)))
    for part in parts:
        total += old[part].double().sum(0)
    mean = total / len(ids)
    for part in parts:
        squares += (old[part].double() - mean).square().sum(0)
    return mean, (squares / len(ids)).sqrt()


def _width(old: Tensor) -> int:
    return max(1, old[0].numel())


def _blocks(rows: RowMap, width: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of one or more rows whose entries have about `_BLOCK_CELLS` elements."""
    most = max(1, _BLOCK_CELLS // width)
    begin = 0
    while begin < len(rows):
        end = max(begin + 1, int(np.searchsorted(rows.starts, rows.starts[begin] + most, "right")) - 1)
        end = min(end, begin + most, len(rows))
        yield begin, end
        begin = end


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
    model: PreTrainedModel,
    reference: str,
    folder: Path,
    weights: VocabularyWeights,
    renew: Callable[[str, Tensor], Tensor],
) -> list[str]:
    """Write the weights into `folder`, with `renew` applied to the vocabulary's; return the names of omitted tensors.

    renew: function from a parameter's name and old value to its new value.

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
