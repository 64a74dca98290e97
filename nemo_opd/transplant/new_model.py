"""Construction of a model with another tokenizer, as a Hugging Face folder (methods.md §2.9)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from huggingface_hub import ModelCardData
from rich.table import Table
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from nemo_opd.alignment import RoleOverrides, TokenAligner, fingerprint, pieces_of
from nemo_opd.alignment.roles import RolePair, paired_roles
from nemo_opd.checkpoint.convert import new_folder, require_unused
from nemo_opd.errors import ModelError
from nemo_opd.evaluation.likelihoods import mean_bits_per_byte, same_texts
from nemo_opd.files import write_atomically
from nemo_opd.logging.card import CARD, hub_name
from nemo_opd.logging.interface import share
from nemo_opd.logging.report import render
from nemo_opd.models.adapter_folder import resolve
from nemo_opd.models.folder import read_own_card, read_template
from nemo_opd.models.load import build_on_meta, compute_dtype, load_config, load_model, load_tokenizer
from nemo_opd.models.stored_weights import check_weights
from nemo_opd.rollout.transformers_engine import chosen_device, max_positions
from nemo_opd.transplant.matrices import (
    EXACT,
    ROLE,
    UNREACHED,
    RowMap,
    VocabularyWeights,
    Weighting,
    build_row_map,
    drawn,
    mapped,
    rewrite,
    vocabulary_weights,
)
from nemo_opd.types import Batch, TokenRows

Random = Literal["all", "unmatched"]
_REPORT = "transplant.json"
_MOST_NAMES = 5
_TAGS = ["nemo-opd", "tokenizer-transfer"]
_TOKEN_ID_KEY = re.compile(r"(?:^|_)token_ids?$")
_OLD_TOKEN_KEYS = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "force_words_ids",
    "forced_decoder_ids",
    "sequence_bias",
    "suppress_tokens",
)
"""Generation config keys that list old tokens, and mean nothing in another vocabulary."""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Numbers of rows in the new matrices by their source."""

    exact: int
    """Tokens with the bytes of an old token, whose row they get."""
    by_role: int
    """Special tokens with the role of an old one, whose row they get."""
    summed: int
    """Tokens spelled by several old tokens, or duplicates of an exact match."""
    unreached: int
    """Tokens that old tokens cannot spell."""
    unused: int
    """Ids without a token, and padding."""

    @property
    def tokens(self) -> int:
        return self.exact + self.by_role + self.summed + self.unreached

    @property
    def total(self) -> int:
        return self.tokens + self.unused


@dataclass(frozen=True, slots=True)
class UnreachedToken:
    id: int
    token: str


@dataclass(frozen=True, slots=True)
class BitsPerByte:
    """Bits per byte of the model before and after, on the same bytes."""

    before: float
    after: float
    num_bytes: int
    bytes_per_token_before: float
    bytes_per_token_after: float


@dataclass(frozen=True, slots=True)
class Transplanted:
    """Report of a transplant."""

    output: str
    model: str
    tokenizer: str
    old_vocab_size: int
    """Rows of the old matrices."""
    rows: RowCounts
    weighting: Weighting
    random: Random | None
    """The rows that were drawn at random."""
    seed: int
    is_tied: bool
    special: tuple[RolePair, ...]
    """Special tokens of the new tokenizer (`student`) and the old ones of their role (`teacher`)."""
    unreached: tuple[UnreachedToken, ...]
    left_out: tuple[str, ...]
    """Tensors that the model does not read, and generation config keys, that were not copied to the new folder."""
    bits_per_byte: BitsPerByte | None
    """None without texts."""

    def save(self, folder: Path) -> None:
        """Write transplant.json and the model's card."""
        write_atomically(folder / _REPORT, (json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n").encode())
        card = render("transplanted.md", metadata=self._metadata().to_yaml(), result=self, lines=list(self.lines()))
        write_atomically(folder / CARD, card)

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """Yield the table's rows: description, number and share of tokens."""
        rows = self.rows
        drawn = {"all": "drawn at random", "unmatched": "drawn at random where not exact or by role"}
        sources = {
            "exact": ("of the same bytes, copied", rows.exact),
            "by role": ("special, of the same role, copied", rows.by_role),
            "summed": (f"spelled by several, weights: {self.weighting}", rows.summed),
            "unreached": ("reached by no old token, the mean of all", rows.unreached),
        }
        for name, (meaning, count) in sources.items():
            yield f"{name}: {meaning}", f"{count:,}", share(count / max(1, rows.tokens))
        if rows.unused:
            yield "no token: ids without one, and padding", f"{rows.unused:,}", ""
        if self.random is not None:
            yield f"all values {drawn[self.random]}, seed {self.seed}", "", ""

    def table(self) -> Table:
        """Return the report as a table for a terminal."""
        table = Table(title=f"{self.old_vocab_size:,} → {self.rows.total:,} rows", title_justify="left")
        table.add_column("tokens of the new tokenizer")
        table.add_column("number", justify="right")
        table.add_column("share", justify="right")
        for line in self.lines():
            table.add_row(*line)
        if (measured := self.bits_per_byte) is not None:
            table.add_section()
            table.add_row("bits per byte before", f"{measured.before:.4f}", "")
            table.add_row("bits per byte after", f"{measured.after:.4f}", "")
            table.add_row("bytes per token before", f"{measured.bytes_per_token_before:.2f}", "")
            table.add_row("bytes per token after", f"{measured.bytes_per_token_after:.2f}", "")
        return table

    def notes(self) -> Iterator[str]:
        """Yield a line for unpaired special tokens, unreached tokens and omitted tensors or keys."""
        if unpaired := [pair.student for pair in self.special if pair.teacher is None]:
            yield f"special tokens without an old one of their role (see --roles): {_summary(unpaired)}"
        if unreached := [token.token for token in self.unreached if token.token not in unpaired]:
            yield f"tokens that no old token reaches: {_summary(unreached)}"
        if self.left_out:
            yield f"left out, as the model does not read it or it names old tokens: {_summary(self.left_out)}"

    def _metadata(self) -> ModelCardData:
        return ModelCardData(
            base_model=hub_name(self.model),
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=_TAGS,
            **read_own_card(self.model).fields(),
        )


def _summary(names: Sequence[str]) -> str:
    """Return the number of names, and the first few."""
    more = ", …" if len(names) > _MOST_NAMES else ""
    return f"{len(names):,} ({', '.join(names[:_MOST_NAMES])}{more})"


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
        renewed = partial(_renewed, rows, num_rows, weights, random, seed)
        left_out = rewrite(skeleton, model, folder, weights, renewed)
        ids = _NewIds(new, rows)
        left_out += _write_generation_config(model, folder, ids)
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


def _renewed(
    rows: RowMap,
    num_rows: int,
    weights: VocabularyWeights,
    random: Random | None,
    seed: int,
    parameter: str,
    old: Tensor,
) -> Tensor:
    """Return the new matrix or bias.

    The embeddings are drawn with a separate seed; a stored copy of a tied head gets the same rows.
    """
    if random is None:
        return mapped(old, rows, num_rows)
    is_embedding = parameter == weights.embeddings or (weights.is_tied and parameter == weights.head)
    new = drawn(old, rows, num_rows, 2 * seed + (not is_embedding))
    if random == "unmatched":
        matched = torch.from_numpy(np.flatnonzero(np.isin(rows.kinds, (EXACT, ROLE))))
        new[matched] = mapped(old, rows, num_rows)[matched]
    return new


class _NewIds:
    """New token ids that replace old ones."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rows: RowMap) -> None:
        self._tokenizer_ids = {role: getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
        self._by_old_id: dict[int, list[int]] = {}
        for new in np.flatnonzero(np.isin(rows.kinds, (EXACT, ROLE))).tolist():
            self._by_old_id.setdefault(int(rows.columns[rows.starts[new]]), []).append(new)

    def replaced(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return new values for all keys that name tokens.

        The new tokenizer's bos, eos and pad take precedence; eos also includes all tokens with the role of an old eos.
        An id without a counterpart becomes None.
        """
        new = {key: self._counterparts(key, old) for key, old in values.items() if _TOKEN_ID_KEY.search(key)}
        for role, tokenizer_id in self._tokenizer_ids.items():
            key = f"{role}_token_id"
            counterparts = new.get(key) or []
            ids = [] if tokenizer_id is None else [tokenizer_id]
            new[key] = list(dict.fromkeys([*ids, *counterparts] if role == "eos" else ids or counterparts))
        return {key: _in_form_of(ids, values.get(key)) for key, ids in new.items()}

    def _counterparts(self, key: str, old: object) -> list[int]:
        """Return the new ids of an old id or a list of them: for eos all counterparts, otherwise the first of each."""
        old_ids = old if isinstance(old, Iterable) else [old]
        new_ids = [self._by_old_id.get(i, []) if isinstance(i, int) else [] for i in old_ids]
        return [new for ids in new_ids for new in (ids if key == "eos_token_id" else ids[:1])]


def _in_form_of(ids: list[int], old: object) -> int | list[int] | None:
    """Return ids in the form of the old value, one id or a list; several ids are always a list."""
    if isinstance(old, list):
        return ids or None
    return ids[0] if len(ids) == 1 else ids or None


def _write_generation_config(reference: str, folder: Path, new: _NewIds) -> list[str]:
    """Write the model's generation config with the new ids; return the omitted keys, which list old tokens.

    All other values are copied. A model without a generation config gets one with ids only.
    """
    file = cached_file(resolve(reference), GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    values = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    left_out = [key for key in _OLD_TOKEN_KEYS if values.pop(key, None) is not None]
    values |= new.replaced(values)
    values = {key: value for key, value in values.items() if value is not None}
    (folder / GENERATION_CONFIG_NAME).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return left_out


def _write_config(config: PretrainedConfig, folder: Path, num_rows: int, architecture: str, ids: _NewIds) -> None:
    for key, value in ids.replaced(config.to_dict()).items():
        setattr(config, key, value)
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
    old, new = [batch.teachers[0].tokens for batch in batches], [batch.shared_student for batch in batches]
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
