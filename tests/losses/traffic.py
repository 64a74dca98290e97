"""Losses at the size of real models, on a pretended GPU that knows shapes only: prints what each asks for, as JSON.

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
"""Of each loss, and of a microbatch of the production recipes."""
MEMORY = 80 * 2**30
"""Of the device."""


def sides_of(positions: int) -> Sides:
    """Make them on the device, without values."""
    sides = Sides.of(positions, partial(torch.empty, dtype=torch.bfloat16), DEVICE)
    sides.student.block_bytes = block_bytes("cuda", MEMORY)
    return sides


def found(work: Work, sides: Sides, *names: str) -> Work:
    """Forward and backward as a worker calls them, in a second call: what is made once was made in the first.

    Leaves have no gradient before: FSDP2 takes that of a microbatch away.
    """
    for _ in range(2):
        work.clear()
        for leaf in sides.student.leaves:
            leaf.grad = None
        backward(compute_together([PLANS[name](sides) for name in names]).loss)
    return work


def asked(work: Work, sides: Sides, *names: str) -> dict[str, Any]:
    """Return what these losses together ask for, with the bytes of all but products."""
    elementwise = sum(kernel.num_bytes for kernel in found(work, sides, *names).kernels if not kernel.flops)
    return work.taken() | {"positions": sides.ids.numel(), "elementwise": elementwise}


def of_positions(work: Work) -> dict[str, Any]:
    """Return what targets at all positions ask for, and the products with the teacher's head, by `ends`."""
    sides = longer_tokens(POSITIONS, partial(torch.empty, dtype=torch.bfloat16), DEVICE)
    sides.student.block_bytes = block_bytes("cuda", MEMORY)
    found: dict[str, Any] = {}
    for ends in ("starts", "drop", "rest", "cover"):
        settings = {} if ends == "starts" else {"positions": "all", "ends": ends}
        for _ in range(2):
            work.clear()
            for leaf in sides.student.leaves:
                leaf.grad = None
            backward(compute_together([sides.plan(**settings)]).loss)
        elementwise = sum(kernel.num_bytes for kernel in work.kernels if kernel.name not in ("mm", "addmm"))
        found[ends] = work.taken() | {"elementwise": elementwise, "product": sides.product}
    return found


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
        alone = {name: asked(work, sides, name) for name in PLANS}
        together, at_a_time = (asked(work, each, *TOGETHER) for each in (sides, sides_of(AT_A_TIME)))
        return alone | {"together": together, "at a time": at_a_time, "positions": of_positions(work)}


def print_parts() -> None:
    with counted(has_values=False) as work:
        sides = sides_of(POSITIONS)
        for names in (TOGETHER, *((name,) for name in PLANS)):
            print(f"{', '.join(names)}\n{by_part(found(work, sides, *names))}\n")


if __name__ == "__main__":
    if "--by-part" in sys.argv:
        print_parts()
    else:
        print(json.dumps(main()))
