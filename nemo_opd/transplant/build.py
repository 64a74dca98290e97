"""A model with another tokenizer, as a Hugging Face folder (methods.md §2.9)."""

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
    """Map from an old matrix or bias to the new one."""

    rows: RowMap
    num_rows: int
    weights: VocabularyWeights
    random: Random | None
    seed: int

    def __call__(self, parameter: str, old: Tensor) -> Tensor:
        if self.random == "all":
            return self._drawn(parameter, old)
        new = mapped(old, self.rows, self.num_rows)
        if self.random == "unmatched":
            is_drawn = np.ones(self.num_rows, np.bool_)
            is_drawn[: len(self.rows)] = ~np.isin(self.rows.kinds, (EXACT, ROLE))
            where = torch.from_numpy(is_drawn)
            new[where] = self._drawn(parameter, old)[where]
        return new

    def _drawn(self, parameter: str, old: Tensor) -> Tensor:
        """Draw with a seed for each parameter; a tied head that is stored too has the draws of the embeddings."""
        is_other = parameter != self.weights.embeddings and not (
            self.weights.is_tied and parameter == self.weights.head
        )
        return drawn(old, self.rows, self.num_rows, 2 * self.seed + is_other)


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
    """Give a model another tokenizer: write a folder that `from_pretrained` loads, and say what became of each token.

    model, tokenizer: folders, hub names or `demo:` names. output: a new folder, or an empty one; whole or absent.
    weighting: of the old tokens that spell a new one. random: rows are drawn instead, all or those without an old token
    of their bytes or role. pad_to_multiple: of the rows. roles: as for TokenAligner. chat_template: a file, in place of
    the tokenizer's own. texts: read in windows of `max_length` tokens for bits per byte before and after.

    Raises ModelError for a model or tokenizer that is missing, unfit or the model's own already, AlignmentError for
    tokenizers whose pieces cannot be exact, CheckpointError for an output that is in use, DataError for unfit texts.
    """
    require_unused(target := Path(output))
    on = chosen_device(device)
    config = load_config(model, key="--model")
    old, new = load_tokenizer(model, key="--model"), load_tokenizer(tokenizer, key="--tokenizer")
    if fingerprint(old) == fingerprint(new):
        raise ModelError(f"--tokenizer={tokenizer}: it is the tokenizer that {model} has; name another one")
    if chat_template is not None:
        new.chat_template = read_template(chat_template, key="--chat-template")
    whole = build_on_meta(config, model, key="--model")
    weights = vocabulary_weights(whole, model, key="--model")
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
        left_out = rewrite(whole, model, folder, weights, _NewRows(rows, num_rows, weights, random, seed))
        ids = NewIds(new, rows)
        left_out += write_generation_config(model, folder, ids)
        _write_config(config, folder, num_rows, type(whole).__name__, ids)
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
            bits_per_byte=_measured((model, old_vocab_size), (str(folder), len(rows)), batches, on),
        )
        result.save(folder)
    return result


def _write_config(config: PretrainedConfig, folder: Path, num_rows: int, architecture: str, ids: NewIds) -> None:
    set_ids(config, ids)
    config.vocab_size = num_rows
    config.architectures = [architecture]  # of a multimodal model's text part there is none
    config.save_pretrained(folder)


def _check(folder: Path) -> None:
    """Raise ModelError where what was written is no whole model."""
    written = load_config(str(folder), key="--output")
    check_weights(build_on_meta(written, str(folder), key="--output"), str(folder), key="--output")
    load_tokenizer(str(folder), key="--output")


def _counts(rows: RowMap, num_rows: int) -> RowCounts:
    unused, unreached, summed, by_role, exact = np.bincount(rows.kinds, minlength=EXACT + 1).tolist()
    return RowCounts(exact, by_role, summed, unreached, unused + num_rows - len(rows))


def _unreached(tokenizer: PreTrainedTokenizerFast, rows: RowMap) -> Iterator[UnreachedToken]:
    for i in np.flatnonzero(rows.kinds == UNREACHED).tolist():
        yield UnreachedToken(i, str(tokenizer.convert_ids_to_tokens(i)))


def _measured(
    before: tuple[str, int], after: tuple[str, int], batches: Sequence[Batch], device: str
) -> BitsPerByte | None:
    """Return what both models find of the texts; None without texts. One model is in memory at a time.

    before, after: model and vocabulary size of its tokenizer.
    """
    if not batches:
        return None
    old, new = [batch.teachers[0].tokens for batch in batches], [batch.student for batch in batches]
    (bits_before, num_bytes), (bits_after, _) = _bits(*before, old, device), _bits(*after, new, device)
    tokens_before, tokens_after = (sum(int((each.num_bytes > 0).sum()) for each in side) for side in (old, new))
    return BitsPerByte(
        before=bits_before / num_bytes,
        after=bits_after / num_bytes,
        num_bytes=int(num_bytes),
        bytes_per_token_before=num_bytes / tokens_before,
        bytes_per_token_after=num_bytes / tokens_after,
    )


def _bits(reference: str, vocab_size: int, rows: Sequence[TokenRows], device: str) -> tuple[float, float]:
    """Return a model's bits of all rows, and their bytes."""
    loaded = load_model(reference, compute_dtype("auto", device), key="--model").eval().to(device)
    found = mean_bits_per_byte(loaded, rows, vocab_size=vocab_size)
    return float(found.total), float(found.count)
