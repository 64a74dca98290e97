"""Bytes that the kernels of losses move to gather a row's logits of paired tokens, in sectors of 32 bytes.

uv run benchmarks/losses_sectors.py --tokenizers FOLDER     # half a minute a pair for its projection

A GPU reads whole sectors. `rows_kernel` gathers a cross-tokenizer teacher's logits of pairs for `launch.ROWS_BLOCK` of
the student's columns at a time, `log_ratios` both sides' logits of the other cells by tiles of lists; a sector counts
once each time. Prints the rows of a table, for p_kl: pairs, and megabytes of a row of fp32 logits: of the pairs; moved
for pairs with the teacher's columns by id, and by student token (handoff.column_order); the same two for lists.
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
from nemo_opd.kernels.forms import CellMap, EntryLists  # noqa: E402
from nemo_opd.losses.cells import covered_columns  # noqa: E402
from nemo_opd.models.load import load_tokenizer  # noqa: E402
from nemo_opd.projection import ProjectionMatrix, cached_projection  # noqa: E402
from nemo_opd.projection.matrix import order_by_student, with_columns  # noqa: E402
from tests.losses.real_sizes import projection as made_up  # noqa: E402

SECTOR, NUMBER = 32, 4
"""Bytes."""
PAIRS = ("llama3_1:qwen3", "llama3_1:gpt4o", "llama3_1:gemma3", "qwen3:llama3_1", "qwen3:gemma3")


def moved_bytes(tokens: np.ndarray, *program: np.ndarray) -> int:
    """Return the bytes that are moved to read logits of tokens [N], each by the program or round with these numbers."""
    reads = np.stack([*program, tokens.astype(np.int64) * NUMBER // SECTOR])
    return SECTOR * np.unique(reads, axis=1).shape[1]


def of_pairs(cells: CellMap) -> int:
    student = np.flatnonzero(cells.partner.numpy() >= 0)
    return moved_bytes(cells.partner.numpy()[student], student // launch.ROWS_BLOCK)


def of_lists(lists: EntryLists) -> int:
    begins = lists.begins.numpy()
    number = np.repeat(np.arange(len(begins) - 1), np.diff(begins))
    place = np.arange(len(number)) - begins[number]
    is_short = number < lists.num_short
    tile, entries = (np.where(is_short, *sizes) for sizes in zip(launch.SHORT_TILE, launch.LONG_TILE, strict=True))
    first = np.where(is_short, 0, lists.num_short)
    return moved_bytes(lists.entries.numpy(), is_short, (number - first) // tile, place // entries)


def row(name: str, matrix: ProjectionMatrix) -> str:
    sizes = matrix.student_vocab_size, matrix.teacher_vocab_size
    by_student = with_columns(matrix, order_by_student(matrix, sizes[1]))
    maps = [covered_columns(order, *sizes, torch.device("cpu")) for order in (matrix, by_student)]
    lists = [of_lists(cells.student_of_cell) + of_lists(cells.teacher_of_cell) for cells in maps]
    megabytes = [f"{number / 1e6:.2f}" for number in (NUMBER * maps[0].num_pairs, *map(of_pairs, maps), *lists)]
    return f"| {' | '.join([name, f'{maps[0].num_pairs:,}', *megabytes])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=PAIRS, metavar="STUDENT:TEACHER", help="folders of tokenizers")
    known = os.environ.get("NEMO_OPD_TOKENIZERS")
    parser.add_argument("--tokenizers", type=Path, default=known, required=known is None, metavar="FOLDER")
    options = parser.parse_args()
    print(row("128,256 ← 200,019, made up", made_up(128_256, 200_019)), flush=True)
    for pair in options.pairs:
        tokenizers = (load_tokenizer(str(options.tokenizers / name), key="--pairs") for name in pair.split(":"))
        print(row(pair.replace(":", " ← "), cached_projection(*tokenizers)[0]), flush=True)


if __name__ == "__main__":
    main()
