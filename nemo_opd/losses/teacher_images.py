"""Teacher tokens that a cross-tokenizer loss maps into the student's vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_opd.losses.piece_tree import first_pieces

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix


def teacher_images(loss: str, projection: ProjectionMatrix) -> NDArray[np.bool_] | None:
    """Return which teacher tokens a loss type maps: bool [W], or None if it uses no map or the projection lacks it.

    The probability of unmapped tokens goes into a rest cell or is left out.
    """
    tokens = np.arange(projection.teacher_vocab_size)
    if loss == "p_kl":
        return np.isin(tokens, projection.indices)
    if loss in ("gold", "strict"):
        return np.isin(tokens, projection.shared_pairs[:, 1])
    if loss == "byte_prefix" and projection.teacher_spellings is not None:
        return first_pieces(projection, "spelling") >= 0
    if loss == "shared_prefix" and projection.teacher_shared_prefix is not None:
        return projection.teacher_shared_prefix >= 0
    return None
