"""On-policy self-distillation on sums, beside a real teacher and GRPO: equal steps, over seeds, and where it fails.

uv run benchmarks/self_distillation.py       # writes self_distillation.{md,json} in benchmarks/results
"""

import argparse
import json
import statistics
from dataclasses import asdict
from datetime import date
from pathlib import Path

from demo import commit, hardware
from on_policy import MEASURES, ROOT, Outcome, by_setting, run_all, table
from rich.console import Console

COMMAND = "uv run benchmarks/self_distillation.py"
CONFIG = ("--config-name=self_distillation", "evaluation.every=20")
SETTINGS = {
    "an average of its weights": (),
    "its current weights": ("teachers.0.weights=student",),
    "a real teacher": ("teachers=arithmetic",),
    "GRPO, exact reward": ("teachers=arithmetic", "loss=grpo", "student.optimizer.lr=2e-4"),
    "an average, of a student that cannot read": ("student=arithmetic",),
}
"""On-policy by reverse KL, but for GRPO."""
GAPS = ("train/privilege_gap/self", "train/contrast_gap/self", "train/leakage/self")
LENGTH = "eval/response_length"


def gaps(outcomes: list[Outcome]) -> str:
    """Write a table of what the teacher makes of its context, first and last, as means over seeds."""
    lines = ["| run | privilege gap | contrast gap | leakage | tokens of an answer |", "|---|---|---|---|---|"]
    for setting, own in by_setting(outcomes).items():
        cells = []
        for measure in (*GAPS, LENGTH):
            measured = [each.scores[measure] for each in own if None not in each.scores[measure][1:]]
            first, last = ([scores[place] for scores in measured] for place in (1, -1))
            cells.append(f"{statistics.mean(first):.2f} → {statistics.mean(last):.2f}" if measured else "—")
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on a core of its own")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("overrides", nargs="*", help="settings for every run, such as train.max_steps=20")
    options = parser.parse_args()
    facts = {"hardware": hardware(), "commit": commit(), "date": date.today().isoformat(), "command": COMMAND}
    settings = {name: (*CONFIG, *own, *options.overrides) for name, own in SETTINGS.items()}
    outcomes = run_all(settings, options.seeds, options.jobs, (*MEASURES, *GAPS, LENGTH))
    write(options.output, facts, outcomes)


def write(folder: Path, facts: dict[str, str], outcomes: list[Outcome]) -> None:
    first = outcomes[0]
    start = " and ".join(f"{first.scores[measure][0]:.1%} ({measure.removeprefix('eval/')})" for measure in MEASURES)
    text = "\n".join(
        [
            "# Self-distillation: a student that reads the worked sum teaches itself to do without",
            "",
            f"Three-digit sums answered right after {first.steps[-1]} steps of 64 sequences, on-policy. The student,",
            f"`demo:arithmetic_reader`, starts at {start}; behind the worked sum it answers all of them.",
            "",
            table(outcomes),
            "",
            f"What the context does, from step {first.steps[1]} to the end, as means over seeds:",
            "",
            gaps(outcomes),
            "",
            *(f"* {name}: {value}" for name, value in facts.items()),
            "",
        ]
    )
    (folder / "self_distillation.md").write_text(text, encoding="utf-8")
    record = {**facts, "outcomes": [asdict(outcome) for outcome in outcomes]}
    (folder / "self_distillation.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    Console().print(text)


if __name__ == "__main__":
    main()
