"""What distillation brings in the demo: the default run against cross-entropy alone, at equal steps, over seeds.

uv run benchmarks/demo.py                      # writes benchmarks/results/demo.md and demo.json
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.progress import track

from nemo_opd.logging.loggers import read
from nemo_opd.paths import commit

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "uv run benchmarks/demo.py"
VARIANTS = {
    "distillation, both teachers": [],
    "distillation, cross-tokenizer teacher": ["teachers=demo_single"],
    "cross-entropy alone": ["loss.kd_weight=0"],
}


@dataclass(frozen=True)
class Outcome:
    variant: str
    seed: int
    start: float
    """Bits per byte of validation before training, and after it."""
    end: float
    steps: int
    wall_s: float
    """The whole command, start-up and report included."""


def run_once(variant: str, seed: int, extra: list[str]) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*VARIANTS[variant], f"run.seed={seed}", f"run.output_dir={folder}/run", *extra]
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, str(ROOT / "examples/run_off_policy_distillation.py"), *overrides],
            check=True,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        wall = time.perf_counter() - began
        records = read(Path(folder) / "run" / "metrics.jsonl")
    bits = [record["val/bits_per_byte"] for record in records if "val/bits_per_byte" in record]
    return Outcome(variant, seed, bits[0], bits[-1], int(records[-1]["step"]), wall)


def table(outcomes: list[Outcome]) -> str:
    lines = ["| run | bits per byte, by seed | mean | wall-clock s, by seed |", "|---|---|---|---|"]
    for variant in VARIANTS:
        own = [outcome for outcome in outcomes if outcome.variant == variant]
        ends = ", ".join(f"{outcome.end:.4f}" for outcome in own)
        mean = statistics.mean(outcome.end for outcome in own)
        seconds = ", ".join(f"{outcome.wall_s:.0f}" for outcome in own)
        lines.append(f"| {variant} | {ends} | {mean:.4f} | {seconds} |")
    return "\n".join(lines)


def hardware() -> str:
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("overrides", nargs="*", help="settings for every run, such as train.max_steps=50")
    options = parser.parse_args()
    pairs = [(variant, seed) for seed in options.seeds for variant in VARIANTS]
    facts = {"hardware": hardware(), "commit": commit(), "date": date.today().isoformat(), "command": COMMAND}
    outcomes = [run_once(variant, seed, options.overrides) for variant, seed in track(pairs, "demo runs")]
    text = "\n".join(
        [
            "# The demo: distillation against cross-entropy alone",
            "",
            f"Validation bits per byte after {outcomes[0].steps} steps; the student starts at {outcomes[0].start:.4f}.",
            "",
            table(outcomes),
            "",
            *(f"* {name}: {value}" for name, value in facts.items()),
            "",
        ]
    )
    (options.output / "demo.md").write_text(text, encoding="utf-8")
    record = {**facts, "outcomes": [asdict(outcome) for outcome in outcomes]}
    (options.output / "demo.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    Console().print(text)


if __name__ == "__main__":
    main()
