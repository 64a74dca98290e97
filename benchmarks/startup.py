"""What a command costs before its first step, in CPU seconds of its own process, by part.

uv run benchmarks/startup.py                   # writes benchmarks/results/startup.md and startup.json

A child process goes through what the command does and notes its CPU time after each part; Ray and the workers are other
processes. Caches are warm: the first child, whose figures are left out, fills them.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a child is started by its path

COMMAND = "uv run benchmarks/startup.py"
EXAMPLE = ROOT / "examples" / "run_off_policy_distillation.py"
CHILD = "--child"
LIBRARIES = ("torch", "datasets", "transformers.modeling_utils", "numba", "ray")
LIMITS = {"a wrong path, refused": 2.0, "in all, to the first step": 15.0}
"""CPU seconds."""


class Parts:
    """CPU seconds of this process since the part before, by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = 0.0

    def end(self, part: str) -> None:
        now = time.process_time()
        self.seconds[part], self._last = now - self._last, now


def child(output_dir: str) -> dict[str, float]:
    """Go through the command to its first step, part by part."""
    parts = Parts()
    parts.end("interpreter")
    from nemo_opd.config.composition import run_with_hydra
    from nemo_opd.config.run import RunConfig
    from nemo_opd.logging.terminal import loading
    from nemo_opd.preflight.inputs import check_inputs

    parts.end("import of settings")
    sys.argv = [str(EXAMPLE), f"run.output_dir={output_dir}"]
    configs: list = []
    run_with_hydra(configs.append, RunConfig, config_dir=ROOT / "configs", config_name="off_policy_demo")
    (config,) = configs
    parts.end("composition and validation")
    check_inputs(config, on_policy=False)
    parts.end("paths and columns")
    with loading("PyTorch and Ray"):
        for library in LIBRARIES:
            importlib.import_module(library)
            parts.end(f"import of {library}")
        from nemo_opd.training.off_policy import Session, preflight, train_step
    parts.end("import of training")
    plan = preflight(config)
    parts.end("preflight")
    with Session(plan) as session:
        parts.end("Ray, workers, models")
        session.measure_start()
        parts.end("validation before the first step")
        next(session.steps())
        train_step(session)
        parts.end("first step")
    return parts.seconds


def in_child() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds.json"
        arguments = [sys.executable, __file__, CHILD, f"{folder}/run", str(result)]
        subprocess.run(arguments, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return json.loads(result.read_text(encoding="utf-8"))


def refusal() -> float:
    """CPU seconds of a whole command with a wrong path."""
    before = os.times()
    command = [sys.executable, str(EXAMPLE), "data.train.arrow_files=/nowhere.arrow"]
    subprocess.run(command, check=False, cwd=ROOT, capture_output=True)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def measured(repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each repeat, by part and in all."""
    in_child()
    runs = [in_child() for _ in range(repeats)]
    seconds = {part: [run[part] for run in runs] for part in runs[0]}
    seconds["in all, to the first step"] = [sum(run.values()) for run in runs]
    seconds["a wrong path, refused"] = [refusal() for _ in range(repeats)]
    return seconds


def table(seconds: dict[str, list[float]]) -> list[str]:
    lines = ["| part | CPU s, median | least | limit |", "|---|---|---|---|"]
    for part, values in seconds.items():
        limit = f"{LIMITS[part]:g}" if part in LIMITS else ""
        lines.append(f"| {part} | {statistics.median(values):.2f} | {min(values):.2f} | {limit} |")
    return lines


def main() -> None:
    from benchmarks.demo import commit, hardware

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    seconds = measured(options.repeats)
    facts = {"hardware": hardware(), "commit": commit(), "date": date.today().isoformat(), "command": COMMAND}
    facts["load"] = f"{load:.1f} before and {os.getloadavg()[0]:.1f} after (CPU seconds grow with it)"
    facts["repeats"] = str(options.repeats)
    text = [
        "# From a command to its first step",
        "",
        "The off-policy demo, in the process of the command, caches warm.",
        "",
    ]
    text += [*table(seconds), "", *(f"* {name}: {value}" for name, value in facts.items()), ""]
    (options.output / "startup.md").write_text("\n".join(text), encoding="utf-8")
    record = {**facts, "limits": LIMITS, "seconds": seconds}
    (options.output / "startup.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        target = Path(sys.argv[3])
        target.write_text(json.dumps(child(sys.argv[2])), encoding="utf-8")
    else:
        main()
