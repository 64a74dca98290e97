"""Tokenizer transplant: embedding and head rows for another tokenizer, built from the old rows (methods.md §2.9)."""

from nemo_opd.transplant.build import BitsPerByte, Random, RowCounts, Transplanted, transplant
from nemo_opd.transplant.matrices import RowMap, Weighting, build_row_map

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
