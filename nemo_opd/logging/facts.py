"""Facts of a run for its report, from config.yaml, hardware.json and metrics.

config.yaml is read as plain YAML instead of a RunConfig, so that runs of other versions can be reported.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from nemo_opd.config.evaluation import Questions
from nemo_opd.errors import DataError
from nemo_opd.files import write_atomically
from nemo_opd.logging.base import RunSummary
from nemo_opd.logging.formats import share

_Fact = tuple[str, str]
"""Label and value."""
Records = Sequence[Mapping[str, float]]

SKIPPED = "train/skipped_steps"

_HARDWARE = "hardware.json"
_RUN_KEYS = (
    ("student", "student.model"),
    ("loss", "loss.type"),
    ("divergence", "loss.divergence"),
    ("temperature", "loss.temperature"),
    ("KD weight", "loss.kd_weight"),
    ("CE weight", "loss.ce_weight"),
    ("scaling", "loss.scaling"),
    ("aggregation", "aggregation.type"),
    ("weights of teachers", "aggregation.weights"),
    ("optimizer", "student.optimizer.type"),
    ("learning rate", "student.optimizer.lr"),
    ("schedule", "student.scheduler.type"),
    ("warm-up steps", "student.scheduler.warmup_steps"),
    ("global batch", "train.global_batch_size"),
    ("microbatch", "train.micro_batch_size"),
    ("tokens of a microbatch", "train.micro_batch_tokens"),
    ("longest sequence", "train.max_length"),
    ("gradient clip", "train.gradient_clip"),
    ("handoff", "handoff.type"),
    ("device", "cluster.device"),
    ("placement", "cluster.placement"),
    ("tensor parallel", "student.parallelism.tp"),
    ("context parallel", "student.parallelism.cp"),
    ("seed", "run.seed"),
)
_TEACHER_KEYS = (("{}", "model"), ("{}", "type"), ("weight {}", "weight"), ("{}", "dtype"), ("loss {}", "loss.type"))


def write_hardware(run: RunSummary) -> None:
    """Write the device and the models' sharding, which settings such as `cluster.device=auto` do not tell.

    A run that continues on other hardware replaces the file.
    """
    hardware = {"device": run.device, "layout": run.layout}
    write_atomically(run.output_dir / _HARDWARE, (json.dumps(hardware, indent=1) + "\n").encode())


def read_hardware(output_dir: Path) -> dict[str, str]:
    """Return values by label; empty if the file is missing or damaged."""
    try:
        hardware = json.loads((output_dir / _HARDWARE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(label): str(value) for label, value in hardware.items()} if isinstance(hardware, dict) else {}


def config_text(output_dir: Path) -> str:
    """Return a run's config.yaml; empty if it does not exist."""
    file = output_dir / "config.yaml"
    return file.read_text(encoding="utf-8") if file.exists() else ""


def read_config(output_dir: Path) -> dict[str, Any]:
    """Return a run's settings as in its config.yaml, with secrets masked; empty if it does not exist.

    Raises DataError if the file is damaged.
    """
    try:
        config = yaml.safe_load(config_text(output_dir)) or {}
        if not isinstance(config, dict):
            raise ValueError("it has no keys")
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{output_dir / 'config.yaml'} is damaged ({reason}); repair or remove it") from error
    return config


def run_name(config: object) -> str | None:
    """Return `run.name`; None if the file lacks it."""
    name = value_at(config, "run.name")
    return None if name is None else str(name)


def number_of_set(config: object, name: str, key: str) -> float:
    """Return a setting of a question set, such as `confidence`, or its default if the file lacks it."""
    sets = value_at(config, "evaluation.sets")
    questions = sets.get(name) if isinstance(sets, dict) else None
    value = value_at(questions if isinstance(questions, dict) else value_at(config, "evaluation"), key)
    return float(value) if isinstance(value, int | float) else float(Questions.model_fields[key].default)


def run_facts(config: object, hardware: Mapping[str, str], records: Records) -> list[_Fact]:
    """Return the settings that are present and not null, the hardware and the number of skipped steps.

    hardware: values by label; they replace settings with the same label.
    """
    settings = [(label, str(value)) for label, key in _RUN_KEYS if (value := value_at(config, key)) is not None]
    facts = [fact for fact in settings if fact[0] not in hardware] + [*hardware.items(), *_lora(config)]
    skipped = [record[SKIPPED] for record in records if SKIPPED in record]
    return [*facts, ("skipped steps", f"{skipped[-1]:.0f}")] if skipped else facts


def _lora(config: object) -> Iterable[_Fact]:
    lora = value_at(config, "student.lora")
    if not isinstance(lora, dict):
        return
    modules = lora.get("target_modules")
    names = ", ".join(map(str, modules)) if isinstance(modules, list) else str(modules).replace("-", " ")
    dropout = f", dropout {lora['dropout']:g}" if lora.get("dropout") else ""
    yield "LoRA", f"rank {lora.get('rank')}, alpha {lora.get('alpha')}{dropout}; {names}; exported {lora.get('export')}"


def teacher_facts(config: object, records: Records) -> list[_Fact]:
    """Return a name and one line for each teacher."""
    teachers = value_at(config, "teachers")
    if not isinstance(teachers, list):
        return []
    return [_teacher_fact(teacher, records) for teacher in teachers]


def _teacher_fact(teacher: object, records: Records) -> _Fact:
    name = str(value_at(teacher, "name"))
    line = [form.format(value) for form, key in _TEACHER_KEYS if (value := value_at(teacher, key)) is not None]
    coverage = f"train/kd_coverage/{name}"
    if finite := [record[coverage] for record in records if math.isfinite(record.get(coverage, math.nan))]:
        line.append(f"KD on {share(fmean(finite))} of the scored tokens")
    return name, ", ".join(line)


def value_at(config: object, key: str) -> object:
    """Return the value of a dotted key; None if it does not exist."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config
