"""Tokenizer transplant: embedding and head rows for another tokenizer, built from the old rows (methods.md §2.9)."""

from nemo_opd.transplant.matrices import RowMap, Weighting, build_row_map
from nemo_opd.transplant.new_model import BitsPerByte, Random, RowCounts, Transplanted, transplant

__all__ = [
    "BitsPerByte",
    "Random",
    "RowCounts",
    "RowMap",
    "Transplanted",
    "Weighting",
    "build_row_map",
    "transplant",
]
