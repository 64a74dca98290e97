"""The on-policy demo beside off-policy distillation on the teacher's samples and GRPO: equal steps, over seeds.

uv run benchmarks/on_policy.py       # writes on_policy.{md,json} in benchmarks/results, and the plot in docs/images
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from demo import commit, hardware
from quality_runs import pin
from rich.console import Console
from rich.progress import track

from nemo_opd.config.data import Source
from nemo_opd.config.rollout import HFRollout
from nemo_opd.data.columns import text_layout
from nemo_opd.data.document_sources import load_documents
from nemo_opd.data.row_types import TEXT, Prompt
from nemo_opd.logging.loggers import read
from nemo_opd.models.load import load_tokenizer
from nemo_opd.rollout.collect import Collector
from nemo_opd.rollout.engine_interface import EngineSpec, Sampling
from nemo_opd.rollout.renderer import TextRenderer
from nemo_opd.rollout.transformers_engine import end_ids, for_model

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "uv run benchmarks/on_policy.py"
TEACHER = "demo:arithmetic_teacher"
ON_TEACHERS_SAMPLES = ("rollout.on_policy_share=0", "rollout.n=1", "data.train.arrow_files=null")
"""One response each of as many prompts as there are rollouts in a step."""
SETTINGS = {
    "on-policy, reverse KL": (),
    "on-policy, reverse KL, 64 prompts": ("rollout.n=1",),
    "on-policy, TCAD": ("loss=tcad", "loss.support_size=16"),
    "on-policy, policy gradient": ("loss=policy_gradient",),
    "on-policy, another tokenizer (p_kl)": (
        "teachers=arithmetic_cross",
        "loss=p_kl",
        "loss.divergence=reverse_kl",
        "loss.ce_weight=0",
    ),
    "on-policy, another tokenizer (policy gradient)": ("teachers=arithmetic_cross", "loss=policy_gradient"),
    "GRPO, exact reward": ("loss=grpo", "student.optimizer.lr=2e-4"),
    "off-policy, forward KL on the teacher's samples": (
        *ON_TEACHERS_SAMPLES,
        "loss=same_vocab",
        "loss.divergence=forward_kl",
        "loss.ce_weight=0",
    ),
    "off-policy, cross-entropy on the teacher's samples": (
        *ON_TEACHERS_SAMPLES,
        "loss.kd_weight=0",
        "loss.ce_weight=1",
    ),
}
OFF_POLICY = tuple(name for name, overrides in SETTINGS.items() if ON_TEACHERS_SAMPLES[0] in overrides)
MEASURES = ("eval/held_out/greedy", "eval/held_out/pass@1")


@dataclass(frozen=True)
class Outcome:
    setting: str
    seed: int
    steps: list[int]
    """Of the evaluations, the first before training."""
    scores: dict[str, list[float | None]]
    """Measure → its value at each of them."""


def teachers_samples(folder: Path, number: int) -> Path:
    """The training prompts of the demo with a response of the teacher each, drawn at temperature 1."""
    documents = load_documents(Source(arrow_files=("demo:arithmetic_train",)), text_layout("text"), key="data.train")
    prompts = [Prompt(i, text) for i, text in enumerate(documents[TEXT][:number])]
    tokenizer = load_tokenizer(TEACHER, key="teacher")
    spec = EngineSpec(len(tokenizer), end_ids(tokenizer), "float32", folder)
    file = folder / "teacher.jsonl"
    with (
        for_model(HFRollout(batch_size=256), spec, TEACHER, "cpu") as engine,
        file.open("w", encoding="utf-8") as lines,
    ):
        collector = Collector(engine, TextRenderer(tokenizer), sampling=Sampling(), max_new_tokens=48, max_length=80)
        for rollout in collector.collect(prompts, 1, 0):
            text, (response,) = rollout.prompt.content, rollout.responses
            lines.write(json.dumps({"text": text, "response": response, "answer": response.split(" ")[-1]}) + "\n")
    return file


def run_once(setting: str, arguments: Sequence[str], measures: Sequence[str], seed: int) -> Outcome:
    """Run the example; measures: of an evaluation, None where its step has none."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                sys.executable,
                str(ROOT / "examples/run_on_policy_distillation.py"),
                *arguments,
                f"run.seed={seed}",
                "evaluation.teachers=false",
                f"run.output_dir={folder}/run",
            ],
            check=True,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        asked = [record for record in read(Path(folder) / "run" / "metrics.jsonl") if MEASURES[0] in record]
    scores = {measure: [record.get(measure) for record in asked] for measure in measures}
    return Outcome(setting, seed, [int(record["step"]) for record in asked], scores)


def run_all(
    settings: Mapping[str, Sequence[str]], seeds: Iterable[int], jobs: int, measures: Sequence[str] = MEASURES
) -> list[Outcome]:
    """Run each setting, by its arguments, with each seed; `jobs` runs at a time, each on a core of its own."""
    cores: SimpleQueue[int] = SimpleQueue()
    for core in range(jobs):
        cores.put(core)
    runs = [partial(run_once, name, own, measures, seed) for seed in seeds for name, own in settings.items()]
    with ThreadPoolExecutor(jobs, initializer=lambda: pin(cores.get())) as pool:
        return list(track(pool.map(lambda run: run(), runs), "runs", total=len(runs)))


def by_setting(outcomes: list[Outcome]) -> dict[str, list[Outcome]]:
    """Group outcomes, in the order of the settings, by seed."""
    names = dict.fromkeys(each.setting for each in outcomes)
    return {name: sorted((o for o in outcomes if o.setting == name), key=lambda each: each.seed) for name in names}


def table(outcomes: list[Outcome]) -> str:
    lines = ["| run | greedy, by seed | mean | sampled, by seed | mean |", "|---|---|---|---|---|"]
    for setting, own in by_setting(outcomes).items():
        cells = []
        for measure in MEASURES:
            ends = [outcome.scores[measure][-1] for outcome in own]
            cells += [", ".join(f"{end:.1%}" for end in ends), f"**{statistics.mean(ends):.1%}**"]
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(outcomes: list[Outcome], file: Path) -> None:
    """Mean over seeds of sampled accuracy, by step."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for setting, own in by_setting(outcomes).items():
        measured = zip(*(one.scores["eval/held_out/pass@1"] for one in own), strict=True)
        means = [statistics.mean(each) for each in measured]
        axes.plot(own[0].steps, means, "--" if setting in OFF_POLICY else "-", marker="o", label=setting)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, 1)
    axes.set_xlabel("step")
    axes.set_ylabel("sampled answers that are right")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=160)


def read_options(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on a core of its own")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("overrides", nargs="*", help="settings for every run, such as train.max_steps=20")
    return parser.parse_args()


def facts_of(command: str) -> dict[str, str]:
    return {"hardware": hardware(), "commit": commit(), "date": date.today().isoformat(), "command": command}


def start_of(outcomes: list[Outcome]) -> str:
    """Write the accuracies before training, which all runs of a student have in common."""
    first = outcomes[0].scores
    return " and ".join(f"{first[measure][0]:.1%} ({measure.removeprefix('eval/held_out/')})" for measure in MEASURES)


def write(folder: Path, name: str, facts: dict[str, str], outcomes: list[Outcome], lines: Sequence[str]) -> None:
    """Write what was found as NAME.md, which is also printed, and as NAME.json."""
    text = "\n".join([*lines, "", *(f"* {key}: {value}" for key, value in facts.items()), ""])
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    record = {**facts, "outcomes": [asdict(outcome) for outcome in outcomes]}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    Console().print(text)


def main() -> None:
    options, facts = read_options(__doc__), facts_of(COMMAND)
    with tempfile.TemporaryDirectory() as folder:
        of_teacher = [f"data.train.jsonl_files={teachers_samples(Path(folder), 4096)}"]
        settings = {
            name: [*own, "evaluation.every=10", *options.overrides, *(of_teacher if name in OFF_POLICY else [])]
            for name, own in SETTINGS.items()
        }
        outcomes = run_all(settings, options.seeds, options.jobs)
    lines = (
        "# The on-policy demo: who learns how much in equal steps",
        "",
        f"Three-digit sums answered right after {outcomes[0].steps[-1]} steps of 64 sequences.",
        f"The student starts at {start_of(outcomes)}. Greedy: the likeliest answer; sampled: at temperature 1.",
        "",
        table(outcomes),
    )
    plot(outcomes, ROOT / "docs" / "images" / "on_policy_accuracy.png")
    write(options.output, "on_policy", facts, outcomes, lines)


if __name__ == "__main__":
    main()
