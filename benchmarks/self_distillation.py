"""On-policy self-distillation on sums, beside a real teacher and GRPO: equal steps, over seeds, and where it fails.

uv run benchmarks/self_distillation.py       # writes self_distillation.{md,json} in benchmarks/results
"""

import statistics

from on_policy import (
    MEASURES,
    Outcome,
    by_setting,
    facts_of,
    read_options,
    run_all,
    start_of,
    table,
    write,
)

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
LENGTH = "eval/held_out/response_length"


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
    options, facts = read_options(__doc__), facts_of(COMMAND)
    settings = {name: (*CONFIG, *own, *options.overrides) for name, own in SETTINGS.items()}
    outcomes = run_all(settings, options.seeds, options.jobs, (*MEASURES, *GAPS, LENGTH))
    steps = outcomes[0].steps
    lines = (
        "# Self-distillation: a student that reads the worked sum teaches itself to do without",
        "",
        f"Three-digit sums answered right after {steps[-1]} steps of 64 sequences, on-policy. The student,",
        f"`demo:arithmetic_reader`, starts at {start_of(outcomes)}; behind the worked sum it answers all of them.",
        "",
        table(outcomes),
        "",
        f"What the context does, from step {steps[1]} to the end, as means over seeds:",
        "",
        gaps(outcomes),
    )
    write(options.output, "self_distillation", facts, outcomes, lines)


if __name__ == "__main__":
    main()
