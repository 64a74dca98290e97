"""Write benchmarks/results/real_models.md and its figures from the results that are there.

uv run python -m benchmarks.real_models.report
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.real_models.figures import curves_png, results_png
from benchmarks.real_models.outcomes import Outcome, read_outcomes
from benchmarks.real_models.place import ROOT, Place
from benchmarks.real_models.run import RESULTS, planned
from benchmarks.real_models.tables import not_run, settings_of, sums_table, texts_table
from nemo_opd.files import write_atomically

FACTS = "prepared.json"
TITLES = {
    "prune": "Fewer layers: prune and recover",
    "tokenizer": "Another tokenizer: transplant and heal",
    "languages": "Gemma-3-270M teaches four languages",
    "gold": "Against TRL's GOLD trainer",
    "on_policy": "On-policy: sums, from a teacher that reads the solution",
}
NOTES = """\
* **bits per byte**: of the validation texts, which every model reads whole; mean over seeds, ± the half width of the
  95 % interval by Student's t where there are several seeds. By domain, means. In a run with a teacher of another
  tokenizer, the bytes of a text count from where both models predict them. So the same student measures 0.004 to 0.008
  apart there and with cross-entropy alone or TRL (*before*), and a difference to such a run has an error of that size.
* **to its control**: the difference, with the same seeds, to cross-entropy alone on the student with as many layers, or
  with the mapped rows of the same tokenizer; for TRL's defaults, `gold` with TRL's weights and `p_kl` for its CPU time,
  to TRL GOLD with our optimizer.
* **CPU s**: processor time of the process, one thread; a step is the median one. What else the machine did does not
  count, but it slows memory for all.
* **which line**: share of right answers to the cloze set, by the product's evaluation.
* The texts are public, and SmolLM2 may have read them. That makes the absolute figures lower for all models;
  differences between runs are between copies of the same model."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", type=Path, default=ROOT / "outputs" / "real_models", help="where `prepare` wrote")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    kept, made = options.results / FACTS, Place(options.place).facts
    if made.exists():
        write_atomically(kept, made.read_bytes())
    facts = json.loads(kept.read_text(encoding="utf-8"))
    write_report(options.results, read_outcomes(options.results), facts, options.seeds)


def write_report(results: Path, outcomes: Sequence[Outcome], facts: dict[str, object], seeds: Sequence[int]) -> None:
    """Write `<results>.md` and figures into `results`."""
    for experiment in ("prune", "tokenizer", "languages", "gold"):
        _write(results / f"{experiment}.png", results_png(outcomes, experiment, TITLES[experiment]))
        _write(
            results / f"{experiment}_curves.png",
            curves_png(outcomes, experiment, "train/ce", f"{TITLES[experiment]}: CE of the batches, first seed"),
        )
    _write(
        results / "on_policy_curves.png",
        curves_png(outcomes, "on_policy", "eval/sums/greedy", f"{TITLES['on_policy']}: right, greedy, first seed"),
    )
    write_atomically(results.with_suffix(".md"), page(results, outcomes, facts, seeds).encode())


def page(results: Path, outcomes: Sequence[Outcome], facts: dict[str, object], seeds: Sequence[int]) -> str:
    lines = ["# Real models: SmolLM2-135M-Instruct", ""]
    for experiment, title in TITLES.items():
        lines += [f"## {title}", ""]
        figures = [name for name in (f"{experiment}.png", f"{experiment}_curves.png") if (results / name).exists()]
        for name in figures:
            lines += [f"![{title}]({results.name}/{name})", ""]
        is_text = experiment != "on_policy"
        lines += [*(texts_table(outcomes, settings_of(experiment)) if is_text else sums_table(outcomes)), ""]
    missing = not_run(outcomes, planned(seeds, None))
    lines += ["## What the columns say", "", NOTES, ""]
    lines += ["## Not run", "", *(missing or ["Nothing is missing."]), ""]
    lines += ["## Machine, texts, commands", "", *_facts(outcomes, facts), ""]
    return "\n".join(lines)


def _facts(outcomes: Sequence[Outcome], facts: dict[str, object]) -> list[str]:
    def all_of(name: str) -> str:
        return ", ".join(sorted({str(getattr(each, name)) for each in outcomes}))

    loads = [each.load for each in outcomes]
    return [
        f"* hardware: {all_of('hardware')}; one thread a run",
        f"* other work on the machine: a load of {min(loads):.0f} to {max(loads):.0f} at the ends of runs"
        if loads
        else "* no runs",
        f"* commits: {all_of('commit')}; dates: {all_of('date')}",
        *(f"* {name}: `{json.dumps(value)}`" for name, value in facts.items()),
        "* `uv run --with gguf --with pip python -m benchmarks.real_models.prepare`, then"
        " `uv run --with trl python -m benchmarks.real_models.run`, then"
        " `uv run python -m benchmarks.real_models.report`; settings of each run are in its JSON file",
    ]


def _write(path: Path, content: bytes | None) -> None:
    if content is not None:
        write_atomically(path, content)


if __name__ == "__main__":
    main()
