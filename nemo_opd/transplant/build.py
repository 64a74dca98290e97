"""Construction of a model with another tokenizer, as a Hugging Face folder (methods.md §2.9)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from nemo_opd.alignment import RoleOverrides, TokenAligner, fingerprint, pieces_of
from nemo_opd.alignment.roles import paired_roles
from nemo_opd.checkpoint.convert import new_folder, require_unused
from nemo_opd.errors import ModelError
from nemo_opd.evaluation.same_texts import mean_bits_per_byte, same_texts
from nemo_opd.models.folder import read_template
from nemo_opd.models.load import build_on_meta, compute_dtype, load_config, load_model, load_tokenizer
from nemo_opd.models.stored_weights import check_weights
from nemo_opd.rollout.hf import chosen_device, max_positions
from nemo_opd.transplant.matrices import drawn, mapped
from nemo_opd.transplant.report import BitsPerByte, RowCounts, Transplanted, UnreachedToken
from nemo_opd.transplant.row_map import EXACT, ROLE, UNREACHED, RowMap, Weighting, build_row_map
from nemo_opd.transplant.token_ids import NewIds, set_ids, write_generation_config
from nemo_opd.transplant.weights import VocabularyWeights, rewrite, vocabulary_weights
from nemo_opd.types import Batch, TokenRows

Random = Literal["all", "unmatched"]


@dataclass(frozen=True, slots=True)
class _NewRows:
    """Function from an old matrix or bias to the new one."""

    rows: RowMap
    num_rows: int
    weights: VocabularyWeights
    random: Random | None
    seed: int

    def __call__(self, parameter: str, old: Tensor) -> Tensor:
        if self.random == "all":
            return self._draw(parameter, old)
        new = mapped(old, self.rows, self.num_rows)
        if self.random == "unmatched":
            is_unmatched = torch.ones(self.num_rows, dtype=torch.bool)
            is_unmatched[: len(self.rows)] = torch.from_numpy(~np.isin(self.rows.kinds, (EXACT, ROLE)))
            new[is_unmatched] = self._draw(parameter, old)[is_unmatched]
        return new

    def _draw(self, parameter: str, old: Tensor) -> Tensor:
        """Draw with a separate seed for the embeddings; a stored copy of a tied head gets the same rows."""
        is_embedding = parameter == self.weights.embeddings or (self.weights.is_tied and parameter == self.weights.head)
        return drawn(old, self.rows, self.num_rows, 2 * self.seed + (not is_embedding))


def transplant(
    model: str,
    tokenizer: str,
    output: str | Path,
    *,
    weighting: Weighting = "bytes",
    random: Random | None = None,
    seed: int = 0,
    pad_to_multiple: int = 1,
    roles: RoleOverrides | None = None,
    chat_template: str | None = None,
    texts: Sequence[str] = (),
    max_length: int = 512,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> Transplanted:
    """Give a model another tokenizer, and write it as a folder for `from_pretrained`, with a report on its tokens.

    model, tokenizer: folders, hub names or `demo:` names. output: a new or empty folder, written completely or not at
    all. weighting: weights of the old tokens that spell a new one. random: draw all rows, or the rows without an old
    token of the same bytes or role, at random. pad_to_multiple: pad the number of rows. roles: as for TokenAligner.
    chat_template: a file to use instead of the tokenizer's template. texts: read in windows of `max_length` tokens to
    measure bits per byte before and after.

    Raises ModelError if the model or tokenizer is missing or unsuitable, or the model has this tokenizer already,
    AlignmentError if the tokenizers' pieces cannot be exact, CheckpointError if the output is in use, and DataError if
    the texts are unsuitable.
    """
    require_unused(target := Path(output))
    compute_device = chosen_device(device)
    config = load_config(model, key="--model")
    old, new = load_tokenizer(model, key="--model"), load_tokenizer(tokenizer, key="--tokenizer")
    if fingerprint(old) == fingerprint(new):
        raise ModelError(f"--tokenizer={tokenizer}: {model} has this tokenizer already; name another one")
    if chat_template is not None:
        new.chat_template = read_template(chat_template, key="--chat-template")
    skeleton = build_on_meta(config, model, key="--model")
    weights = vocabulary_weights(skeleton, model, key="--model")
    rows = build_row_map(new, old, config.vocab_size, weighting=weighting, roles=roles)
    num_rows = -(-len(rows) // pad_to_multiple) * pad_to_multiple
    num_old_rows, old_vocab_size = config.vocab_size, min(config.vocab_size, pieces_of(old).vocab_size)
    batches: list[Batch] = []
    if texts:
        length = min(max_length, max_positions(config) or max_length)
        batches = same_texts(
            texts, new, old, TokenAligner(new, old, roles=roles), max_length=length, num_old_rows=num_old_rows
        )

    with new_folder(target) as folder:
        left_out = rewrite(skeleton, model, folder, weights, _NewRows(rows, num_rows, weights, random, seed))
        ids = NewIds(new, rows)
        left_out += write_generation_config(model, folder, ids)
        _write_config(config, folder, num_rows, type(skeleton).__name__, ids)
        new.save_pretrained(folder)
        _check(folder)
        result = Transplanted(
            output=str(target),
            model=model,
            tokenizer=tokenizer,
            old_vocab_size=num_old_rows,
            rows=_counts(rows, num_rows),
            weighting=weighting,
            random=random,
            seed=seed,
            is_tied=weights.is_tied,
            special=tuple(paired_roles(new, old, roles)),
            unreached=tuple(_unreached(new, rows)),
            left_out=tuple(left_out),
            bits_per_byte=_measure((model, old_vocab_size), (str(folder), len(rows)), batches, compute_device),
        )
        result.save(folder)
    return result


def _write_config(config: PretrainedConfig, folder: Path, num_rows: int, architecture: str, ids: NewIds) -> None:
    set_ids(config, ids)
    config.vocab_size = num_rows
    config.architectures = [architecture]  # the configuration of a multimodal model's text part has none
    config.save_pretrained(folder)


def _check(folder: Path) -> None:
    """Raise ModelError if the written folder is not a complete model."""
    written = load_config(str(folder), key="--output")
    check_weights(build_on_meta(written, str(folder), key="--output"), str(folder), key="--output")
    load_tokenizer(str(folder), key="--output")


def _counts(rows: RowMap, num_rows: int) -> RowCounts:
    unused, unreached, summed, by_role, exact = np.bincount(rows.kinds, minlength=EXACT + 1).tolist()
    return RowCounts(exact, by_role, summed, unreached, unused + num_rows - len(rows))


def _unreached(tokenizer: PreTrainedTokenizerFast, rows: RowMap) -> Iterator[UnreachedToken]:
    for i in np.flatnonzero(rows.kinds == UNREACHED).tolist():
        yield UnreachedToken(i, str(tokenizer.convert_ids_to_tokens(i)))


def _measure(
    old_model: tuple[str, int], new_model: tuple[str, int], batches: Sequence[Batch], device: str
) -> BitsPerByte | None:
    """Measure both models on the texts, one in memory at a time; return None without texts.

    old_model, new_model: (reference, vocabulary size of its tokenizer).
    """
    if not batches:
        return None
    old, new = [batch.teachers[0].tokens for batch in batches], [batch.student for batch in batches]
    (old_bits, num_bytes), (new_bits, _) = _bits(*old_model, old, device), _bits(*new_model, new, device)
    old_tokens, new_tokens = (sum(int((rows.num_bytes > 0).sum()) for rows in side) for side in (old, new))
    return BitsPerByte(
        before=old_bits / num_bytes,
        after=new_bits / num_bytes,
        num_bytes=int(num_bytes),
        bytes_per_token_before=num_bytes / old_tokens,
        bytes_per_token_after=num_bytes / new_tokens,
    )


def _bits(reference: str, vocab_size: int, rows: Sequence[TokenRows], device: str) -> tuple[float, float]:
    """Return a model's total bits over all rows, and their number of bytes."""
    loaded = load_model(reference, compute_dtype("auto", device), key="--model").eval().to(device)
    mean = mean_bits_per_byte(loaded, rows, vocab_size=vocab_size)
    return float(mean.total), float(mean.count)
