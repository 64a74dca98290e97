"""Losses in the sizes of real models on a pretended GPU that knows only shapes: prints their kernels and bytes as JSON.

uv run python -m tests.losses.traffic
uv run python -m tests.losses.traffic --by-part    # kernels and gigabytes by operation, most bytes first

Hidden states and heads are in bf16.
"""

import json
import sys
from collections import Counter
from functools import partial
from typing import Any

import torch

from nemo_opd.logits.blocks import block_bytes
from nemo_opd.logits.blockwise import backward
from nemo_opd.logits.planned import compute_together
from tests.losses.real_sizes import PLANS, TOGETHER, Sides, longer_tokens
from tests.pretend_gpu import DEVICE, Work, counted

POSITIONS, AT_A_TIME = 2048, 8192
"""Positions for each loss, and in a microbatch of the production recipes."""
MEMORY = 80 * 2**30
"""Bytes of the device's memory."""


def sides_of(positions: int) -> Sides:
    """Make them on the device, without values."""
    sides = Sides.of(positions, partial(torch.empty, dtype=torch.bfloat16), DEVICE)
    sides.student.block_bytes = block_bytes("cuda", MEMORY)
    return sides


def second_call(work: Work, sides: Sides, *names: str) -> Work:
    """Count forward and backward as a worker calls them, in the second call, after caches are filled.

    Leaves start without a gradient, because FSDP2 removes it after each microbatch.
    """
    for _ in range(2):
        work.clear()
        for leaf in sides.student.leaves:
            leaf.grad = None
        backward(compute_together([PLANS[name](sides) for name in names]).loss)
    return work


def measure(work: Work, sides: Sides, *names: str) -> dict[str, Any]:
    """Return the work of these losses together, and the bytes outside of products."""
    elementwise = sum(kernel.num_bytes for kernel in second_call(work, sides, *names).kernels if not kernel.flops)
    return work.taken() | {"positions": sides.ids.numel(), "elementwise": elementwise}


def measure_positions(work: Work) -> dict[str, Any]:
    """Return the work of targets at all positions, and of the products with the teacher's head, keyed by `ends`."""
    sides = longer_tokens(POSITIONS, partial(torch.empty, dtype=torch.bfloat16), DEVICE)
    sides.student.block_bytes = block_bytes("cuda", MEMORY)
    by_ends: dict[str, Any] = {}
    for ends in ("starts", "drop", "rest", "cover"):
        settings = {} if ends == "starts" else {"positions": "all", "ends": ends}
        for _ in range(2):
            work.clear()
            for leaf in sides.student.leaves:
                leaf.grad = None
            backward(compute_together([sides.plan(**settings)]).loss)
        elementwise = sum(kernel.num_bytes for kernel in work.kernels if kernel.name not in ("mm", "addmm"))
        by_ends[ends] = work.taken() | {"elementwise": elementwise, "product": sides.product}
    return by_ends


def by_part(work: Work) -> str:
    """Return a table of operations."""
    kernels, num_bytes = Counter[str](), Counter[str]()
    for kernel in work.kernels:
        kernels[kernel.name] += 1
        num_bytes[kernel.name] += kernel.num_bytes
    rows = [f"{total / 1e9:8.3f} GB {kernels[name]:4d} {name}" for name, total in num_bytes.most_common()]
    return "\n".join(row for row in rows if not row.lstrip().startswith("0.000"))


def main() -> dict[str, Any]:
    with counted(has_values=False) as work:
        sides = sides_of(POSITIONS)
        alone = {name: measure(work, sides, name) for name in PLANS}
        together, at_a_time = (measure(work, microbatch, *TOGETHER) for microbatch in (sides, sides_of(AT_A_TIME)))
        return alone | {"together": together, "at a time": at_a_time, "positions": measure_positions(work)}


def print_parts() -> None:
    with counted(has_values=False) as work:
        sides = sides_of(POSITIONS)
        for names in (TOGETHER, *((name,) for name in PLANS)):
            print(f"{', '.join(names)}\n{by_part(second_call(work, sides, *names))}\n")


if __name__ == "__main__":
    if "--by-part" in sys.argv:
        print_parts()
    else:
        print(json.dumps(main()))
