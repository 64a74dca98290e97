"""The JSD of hidden states and heads in bf16, ours beside Liger-Kernel's, at the shape of Liger-Kernel's own benchmark.

uv run --with liger-kernel benchmarks/losses_liger.py                # on a GPU: 8,192 tokens, 128,256 columns
uv run --with liger-kernel benchmarks/losses_liger.py --divisor 64   # in small, as on a CPU

Both heads are 4,096 wide. Liger-Kernel's benchmark has the same sizes (`benchmark_fused_linear_jsd.py` in its
repository). Ways take turns, forward and backward. Prints a line of JSON for each: milliseconds, their ratio to the
matrix products alone, and the peak of memory, inputs included.
"""

import argparse
import json
from importlib.metadata import PackageNotFoundError

import torch
from demo import commit, hardware
from losses import OURS, compare_heads
from losses_third_party import liger_heads
from losses_two_heads import Heads, ours

TOKENS, WIDTH, COLUMNS = 8_192, 4_096, 128_256
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--divisor", type=int, default=1, help="of all sizes, for a quick try")
    divisor = parser.parse_args().divisor
    tokens, width, columns = (size // divisor for size in (TOKENS, WIDTH, COLUMNS))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        ways = {OURS: ours, **liger_heads(device)}
    except PackageNotFoundError:
        raise SystemExit("liger-kernel is not installed; add it with `uv run --with liger-kernel`") from None
    heads = Heads.random(tokens + 1, columns, (width, width), torch.bfloat16, device)  # the last token predicts nothing
    inputs_bytes = sum(tensor.nbytes for tensor in heads.inputs)
    facts = {
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else hardware(),
        "commit": commit(),
        "tokens": tokens,
        "width": width,
        "columns": columns,
    }
    for row in compare_heads(heads, ways, ROUNDS):
        peak = {"peak, GiB": (row.memory.peak + inputs_bytes) / 2**30} if row.name in ways else {}
        print(json.dumps({"way": row.name, "ms": row.ms, "over products": row.to_floor, **peak, **facts}), flush=True)


if __name__ == "__main__":
    main()
