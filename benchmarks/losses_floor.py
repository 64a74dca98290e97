"""Cross-entropy, same_vocab and p_kl together against the products with the heads alone.

uv run benchmarks/losses_floor.py     # on one thread of a CPU; 8 GB of memory, a minute
uv run benchmarks/losses_floor.py --device cuda --positions 2048 8192

Shapes of Llama-3.2-1B learning from Llama-3.2-3B and Qwen3-4B, fp32 on a CPU and bf16 on a GPU. Both take turns, round
by round. With --tokenizers, or NEMO_OPD_TOKENIZERS, vocabularies and projection are those of real tokenizers, else made
up; --column-order is handoff.column_order of a run, for real tokenizers. Prints a line of JSON for each number of
positions, and writes the last one as losses_floor.json into benchmarks/results or another folder. Exit status 1 on a
GPU whose products take less than 60 % of the time.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from demo import commit, hardware  # noqa: E402
from torch import Tensor  # noqa: E402

from nemo_opd.logits.blocks import block_bytes  # noqa: E402
from nemo_opd.logits.blockwise import backward  # noqa: E402
from nemo_opd.logits.planned import compute_together  # noqa: E402
from nemo_opd.models.load import load_tokenizer  # noqa: E402
from nemo_opd.projection import ProjectionMatrix, cached_projection  # noqa: E402
from nemo_opd.projection.matrix import order_by_student, with_columns  # noqa: E402
from tests.losses.real_sizes import PLANS, TOGETHER, Sides  # noqa: E402

SCALE = 0.02
"""Of hidden states and heads, so that logits are near 0, as of a model that knows little."""
IN_A_ROW = 3
"""Calls that are timed together on a GPU, which plans of the next wait for as in a step."""
BUDGET = "budget of a block, times the default"
LEAST_SHARE = 0.6
"""Of the time of losses on a GPU that their products take."""


def draw(*shape: int, device: torch.device) -> Tensor:
    return SCALE * torch.randn(shape, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)


def losses(sides: Sides) -> None:
    for leaf in sides.student.leaves:
        leaf.grad = None
    backward(compute_together([PLANS[name](sides) for name in TOGETHER]).loss)


@torch.no_grad()
def products(sides: Sides) -> None:
    """Multiply as the losses must: logits of each head, then the gradients of the student's hidden states and head.

    A head's last rows, up to 63, are left out: a GPU takes several times as long for an odd number of them.
    """
    student, same, cross = (
        (side.hidden[0], side.head.weight[: max(len(side.head.weight) // 64, 1) * 64])
        for side in (sides.student, sides.same, sides.cross)
    )
    compared = int(sides.chunks.max())  # chunks; the first has no predictor
    for (hidden, weight), rows in ((same, len(same[0]) - 1), (cross, compared)):
        hidden[:rows] @ weight.t()
    hidden, weight = student
    gradient = hidden[:-1] @ weight.t()
    gradient @ weight
    gradient.t() @ hidden[:-1]


def seconds(of: Callable[[Sides], None], sides: Sides) -> float:
    """Time a call; on a GPU, by its own clock and while it has work, as in a step the planning runs behind a model."""
    if not sides.ids.is_cuda:
        start = time.perf_counter()
        of(sides)
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    of(sides)
    begin.record()
    for _ in range(IN_A_ROW):
        of(sides)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / IN_A_ROW


def real_projection(options: argparse.Namespace) -> ProjectionMatrix | None:
    if options.tokenizers is None or options.divisor > 1:
        return None
    names = (str(options.tokenizers / name) for name in options.pair.split(":"))
    matrix = cached_projection(*(load_tokenizer(name, key="--pair") for name in names))[0]
    if options.column_order == "teacher":
        return matrix
    return with_columns(matrix, order_by_student(matrix, matrix.teacher_vocab_size))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--positions", type=int, nargs="+", default=[64])
    parser.add_argument("--budgets", type=int, nargs="+", default=[1], help="of a block: times the default, on a GPU")
    parser.add_argument("--divisor", type=int, default=1, help="of widths and vocabularies: for a quick try")
    parser.add_argument("--tokenizers", type=Path, default=os.environ.get("NEMO_OPD_TOKENIZERS"))
    parser.add_argument("--pair", default="llama3_1:qwen3", metavar="STUDENT:TEACHER", help="folders of --tokenizers")
    parser.add_argument("--column-order", choices=("student", "teacher"), default="student")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    between = real_projection(options)
    cases = [(positions, times) for positions in options.positions for times in options.budgets]
    found = [measure(options, positions, between, times) for positions, times in cases]
    (options.output / "losses_floor.json").write_text(json.dumps(found[-1], indent=1) + "\n", encoding="utf-8")
    slow = [each for each in found if each[BUDGET] == 1 and each["losses / products"] > 1 / LEAST_SHARE]
    return int(options.device == "cuda" and bool(slow))


def measure(
    options: argparse.Namespace, positions: int, between: ProjectionMatrix | None, times: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    sides = Sides.of(positions, draw, torch.device(options.device), options.divisor, between)
    if options.device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
        sides.student.block_bytes = times * block_bytes("cuda", memory)
    pairs = [(seconds(losses, sides), seconds(products, sides)) for _ in range(1 + options.rounds)][1:]
    ratios = [ours / floor for ours, floor in pairs]
    found: dict[str, Any] = {
        "hardware": hardware() if options.device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": date.today().isoformat(),
        "command": " ".join(["uv run benchmarks/losses_floor.py", *sys.argv[1:]]),
        "positions": positions,
        BUDGET: times,
        "vocabularies": [side.head.weight.shape[0] for side in (sides.student, sides.same, sides.cross)],
        "projection": "made up" if between is None else options.pair,
        "column_order": "teacher" if between is None else options.column_order,
        "threads": 1,
        "divisor": options.divisor,
        "losses_s": statistics.median(ours for ours, _ in pairs),
        "products_s": statistics.median(floor for _, floor in pairs),
        "losses / products": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
    }
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
