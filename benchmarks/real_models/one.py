"""One run of the real-model benchmark, in a process of its own."""

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.real_models.bits import bits_per_byte
from benchmarks.real_models.outcomes import Outcome, StepTimes, outcome_of, read_outcomes, write_outcome
from benchmarks.real_models.place import Place
from benchmarks.real_models.questions import TASK
from benchmarks.real_models.settings import TOP_K, Setting, Size, configuration, evaluation
from benchmarks.step_gold import peak_bytes
from nemo_opd import distil, distil_on_policy
from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.config.run import from_dict, validated


def run_one(setting: Setting, seed: int, size: Size, place: Place, results: Path) -> None:
    """Run it, from its newest checkpoint where there is one, and write its result; its folder then has no weights."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    steps = number_of_steps(setting, size, results)
    config = configuration(setting, seed, steps, size, place)
    folder = Path(config["run"]["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    if setting.trainer == "trl":
        from benchmarks.real_models.gold import run_gold  # TRL is there with `uv run --with trl` alone

        outcome = run_gold(setting, seed, steps, config, place)
    else:
        outcome = _run_ours(setting, seed, config, place, began)
    outcome = replace(outcome, memory_bytes=peak_bytes(size.device))
    if setting.experiment == "prune":
        accuracy = which_line(str(folder / "final"), folder / "evaluation", place, size.dtype)
        outcome = replace(outcome, end={**outcome.end, TASK: accuracy})
    if setting.experiment == "languages":
        # In fp32, as arms differ by little.
        start, end = (
            bits_per_byte(model, place.languages_validation, torch.float32, size.device)
            for model in (place.original, folder / "final")
        )
        outcome = replace(outcome, start=start, end=end)
    if size.device == "cuda":
        outcome = replace(outcome, hardware=torch.cuda.get_device_name())
    write_outcome(results, replace(outcome, settings=without_folder(outcome.settings, place.root)))
    for name in ("checkpoints", "final", "final_told"):
        shutil.rmtree(folder / name, ignore_errors=True)


def without_folder(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return settings whose paths in a folder are relative to it."""
    return json.loads(json.dumps(settings).replace(f"{folder}/", ""))


def _run_ours(setting: Setting, seed: int, config: dict[str, Any], place: Place, began: float) -> Outcome:
    began_cpu = time.process_time()
    for teacher in config["teachers"]:
        if teacher.get("type") == "cached":
            build_cache_of(teacher, config, place)
    cache_cpu_s = time.process_time() - began_cpu
    folder = Path(config["run"]["output_dir"])
    run = distil_on_policy if setting.experiment == "on_policy" else distil
    run(config, callbacks=[StepTimes(folder)])
    outcome = outcome_of(folder, setting.experiment, setting.name, seed, config, time.perf_counter() - began)
    if outcome.steps < config["train"]["max_steps"]:
        raise SystemExit(f"error: {setting.name}, seed {seed}, was ended at step {outcome.steps}; run it again")
    return replace(outcome, cache_cpu_s=cache_cpu_s)


def number_of_steps(setting: Setting, size: Size, results: Path) -> int:
    """Return the steps of a run, for settings that are to take as long as another by the first seed's CPU times."""
    steps = size.on_policy_steps if setting.experiment == "on_policy" else size.steps
    if setting.as_long_as is None:
        return steps
    costs = [first_cost(name, results) for name in setting.as_long_as]
    if None in costs:
        raise SystemExit(
            f"error: {setting.name} needs the results of {' and '.join(setting.as_long_as)}; run these before"
        )
    own, wanted = costs
    return max(1, round(steps * wanted / own))


def first_cost(name: str, results: Path) -> float | None:
    """Return CPU seconds of a step of a setting, with its first seed and its cache; None without a result."""
    outcome = next((outcome for outcome in read_outcomes(results) if outcome.setting == name), None)
    return None if outcome is None else outcome.cpu_s_per_step + outcome.cache_cpu_s / outcome.steps


def build_cache_of(teacher: Mapping[str, Any], config: dict[str, Any], place: Place) -> None:
    """Ask the teacher about the training texts, as the run reads them; adds what is missing."""
    from nemo_opd.training.cache_build import CacheForm, build_cache

    is_gemma = teacher["name"] == "gemma"
    model, kind = (place.gemma3, "cross_tokenizer") if is_gemma else (place.original, "same_tokenizer")
    asked = {"name": teacher["name"], "type": kind, "model": str(model)}
    build_cache(from_dict({**config, "teachers": [asked]}), 0, Path(teacher["cache"]), CacheForm(TOP_K))


def which_line(model: str, output: Path, place: Place, dtype: str) -> float:
    """Return the share of right answers to the cloze set, by the product's own evaluation."""
    from nemo_opd.training.standalone import evaluate

    evaluate(validated(evaluation(model, str(output), place, dtype), EvaluationConfig), Console(quiet=True))
    written = json.loads((output / "results.json").read_text(encoding="utf-8"))
    return float(written["benchmarks"][TASK]["estimates"]["acc"]["value"])
