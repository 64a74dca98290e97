"""Teachers with the student's tokenizer: what has to agree, and which tokens one side may lack (methods.md §4)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from nemo_opd.alignment import Pieces
from nemo_opd.alignment.pieces import ADDED, HOLE
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.data.samples import SameTokenizer
from nemo_opd.errors import ModelError
from nemo_opd.training.side import Side


def require_same_tokenizer(
    i: int, settings: Teacher, student: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Raises ModelError where a token of both has two ids, or an id of both is two tokens."""
    ours, theirs = student.get_vocab(), tokenizer.get_vocab()
    by_id = {index: token for token, index in theirs.items()}
    differing = [
        f"{token!r} is {index} and {theirs[token]}" if token in theirs else f"{index} is {token!r} and {by_id[index]!r}"
        for token, index in sorted(ours.items(), key=lambda item: item[1])
        if theirs.get(token, index) != index or by_id.get(index, token) != token
    ]
    if differing:
        raise ModelError(
            f"teachers.{i}.type=same_tokenizer: the tokenizer of {settings.name} differs from the student's in "
            f"{len(differing)} of {len(ours)} tokens ({'; '.join(differing[:2])}); write type: cross_tokenizer"
        )


def require_common_text(i: int, settings: Teacher, student: Side, teacher: Side) -> None:
    """Raises ModelError where one side has tokens of ordinary text that the other lacks: it would cut the text
    differently. Special and added tokens may be missing, as they occur in few texts.
    """
    for ours, theirs, names in (
        (student, teacher, ("the student's tokenizer", settings.name)),
        (teacher, student, (f"the tokenizer of {settings.name}", "the student")),
    ):
        ids = lacking_ids(ours, theirs)
        ordinary = ids[~is_extra(ours.pieces)[ids]]
        if len(ordinary):
            token = ours.tokenizer.convert_ids_to_tokens(int(ordinary[0]))
            raise ModelError(
                f"teachers.{i}.type=same_tokenizer: {names[0]} has {len(ordinary)} tokens of ordinary text that "
                f"{names[1]} lacks (such as {int(ordinary[0])}, {token!r}), so they cut texts differently; write type: "
                "cross_tokenizer"
            )


def is_extra(pieces: Pieces) -> NDArray[np.bool_]:
    """[V]: special tokens, and those that were added to a trained vocabulary."""
    return pieces.is_special | (pieces.origin == ADDED)


def lacking_ids(side: Side, other: Side) -> NDArray[np.int64]:
    """Tokens of one side that the other does not have, or has no embedding for."""
    has = np.zeros(side.vocab_size, np.bool_)
    common = min(side.vocab_size, other.vocab_size)
    has[:common] = other.pieces.origin[:common] != HOLE
    return np.flatnonzero((side.pieces.origin[: side.vocab_size] != HOLE) & ~has)


def same_tokenizer_reader(config: RunConfig, i: int, student: Side, teachers: Sequence[Side]) -> SameTokenizer:
    """How teacher i reads the student's ids; teachers whose logits are averaged are asked about the same tokens."""
    together = teachers if config.aggregation.type == "averaged_logits" else teachers[i : i + 1]
    ids = {int(index) for teacher in together for index in lacking_ids(student, teacher)}
    own = teachers[i].tokenizer
    known = (own.unk_token_id, own.pad_token_id, 0)
    readable = (index for index in known if index is not None and index < teachers[i].vocab_size and index not in ids)
    return SameTokenizer(tuple(sorted(ids)), next(readable, 0))
