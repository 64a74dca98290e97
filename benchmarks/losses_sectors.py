"""Bytes that the kernels of losses move to gather a row's logits of paired tokens, in sectors of 32 bytes.

NEMO_OPD_TOKENIZERS=FOLDER uv run benchmarks/losses_sectors.py     # half a minute a pair for its projection

A GPU reads whole sectors. `rows_kernel` gathers the fp32 logits of a cross-tokenizer teacher for `launch.ROWS_BLOCK` of
the student's columns at a time; a sector counts once each time. Prints the rows of a table, megabytes a row of logits:
paired tokens, their bytes, and the bytes moved with the teacher's columns by id and by student token
(handoff.column_order).
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from nemo_opd.kernels import launch  # noqa: E402
from nemo_opd.losses.cells import covered_columns  # noqa: E402
from nemo_opd.models.load import load_tokenizer  # noqa: E402
from nemo_opd.projection import ProjectionMatrix, cached_projection  # noqa: E402
from nemo_opd.projection.columns import order_by_student, with_columns  # noqa: E402
from tests.losses.real_sizes import projection as made_up  # noqa: E402

SECTOR, NUMBER = 32, 4
"""Bytes."""
PAIRS = ("llama3_1:qwen3", "llama3_1:gpt4o", "llama3_1:gemma3", "qwen3:llama3_1", "qwen3:gemma3")


def moved_bytes(partner: np.ndarray) -> int:
    """Return the bytes moved for the teacher tokens of pairs, −1 for tokens without one: [V]."""
    student = np.flatnonzero(partner >= 0)
    sectors = np.stack([student // launch.ROWS_BLOCK, partner[student] * NUMBER // SECTOR])
    return SECTOR * np.unique(sectors, axis=1).shape[1]


def row(name: str, matrix: ProjectionMatrix) -> str:
    sizes = matrix.student_vocab_size, matrix.teacher_vocab_size
    by_student = with_columns(matrix, order_by_student(matrix, sizes[1]))
    maps = [covered_columns(order, *sizes, torch.device("cpu")) for order in (matrix, by_student)]
    megabytes = [NUMBER * maps[0].num_pairs, *(moved_bytes(cells.partner.numpy()) for cells in maps)]
    return " | ".join([f"| {name}", f"{maps[0].num_pairs:,}", *(f"{number / 1e6:.2f}" for number in megabytes)]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=PAIRS, metavar="STUDENT:TEACHER", help="folders of tokenizers")
    options = parser.parse_args()
    folder = Path(os.environ["NEMO_OPD_TOKENIZERS"])
    print(row("128,256 ← 200,019, made up", made_up(128_256, 200_019)), flush=True)
    for pair in options.pairs:
        tokenizers = (load_tokenizer(str(folder / name), key="--pairs") for name in pair.split(":"))
        print(row(pair.replace(":", " ← "), cached_projection(*tokenizers)[0]), flush=True)


if __name__ == "__main__":
    main()
