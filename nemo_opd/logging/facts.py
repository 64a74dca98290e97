"""What config.yaml says about a run, in a person's words.

It is read as plain YAML and not as a RunConfig: a later version, whose settings differ, can make a report again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from nemo_opd.config.evaluation import Questions
from nemo_opd.logging.formats import share

Fact = tuple[str, str]
Records = Sequence[Mapping[str, float]]

SKIPPED, COVERAGE = "train/skipped_steps", "train/kd_coverage/"

RUN_KEYS = (
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
    ("longest sequence", "train.max_length"),
    ("gradient clip", "train.gradient_clip"),
    ("handoff", "handoff.type"),
    ("device", "cluster.device"),
    ("placement", "cluster.placement"),
    ("tensor parallel", "student.parallelism.tp"),
    ("context parallel", "student.parallelism.cp"),
    ("seed", "run.seed"),
)
TEACHER_KEYS = (("{}", "model"), ("{}", "type"), ("weight {}", "weight"), ("{}", "dtype"), ("loss {}", "loss.type"))


def run_name(config: object) -> str | None:
    """`run.name`, where the file has one."""
    name = _at(config, "run.name")
    return None if name is None else str(name)


def correct_reward(config: object) -> float:
    """`evaluation.correct_reward`, or its default where the file has none."""
    reward = _at(config, "evaluation.correct_reward")
    return float(reward) if isinstance(reward, int | float) else Questions.model_fields["correct_reward"].default


def run_facts(config: object, hardware: Mapping[str, str], records: Records) -> list[Fact]:
    """Label and value of the settings that are there and not null, and of what the run has found.

    hardware: what it ran on, where that is known; it takes the place of the settings about it.
    """
    known = [(label, str(value)) for label, key in RUN_KEYS if (value := _at(config, key)) is not None]
    facts = [fact for fact in known if fact[0] not in hardware] + [*hardware.items(), *_lora(config)]
    skipped = [record[SKIPPED] for record in records if SKIPPED in record]
    return [*facts, ("skipped steps", f"{skipped[-1]:.0f}")] if skipped else facts


def _lora(config: object) -> Iterable[Fact]:
    lora = _at(config, "student.lora")
    if not isinstance(lora, dict):
        return
    modules = lora.get("target_modules")
    shown = ", ".join(map(str, modules)) if isinstance(modules, list) else str(modules).replace("-", " ")
    dropout = f", dropout {lora['dropout']:g}" if lora.get("dropout") else ""
    yield "LoRA", f"rank {lora.get('rank')}, alpha {lora.get('alpha')}{dropout}; {shown}; exported {lora.get('export')}"


def teacher_facts(config: object, records: Records) -> list[Fact]:
    """Name and one line for each teacher."""
    teachers = _at(config, "teachers")
    if not isinstance(teachers, list):
        return []
    named = [(str(_at(teacher, "name")), teacher) for teacher in teachers]
    return [(name, ", ".join((*_teacher_line(teacher), *_coverage(name, records)))) for name, teacher in named]


def _coverage(name: str, records: Records) -> Iterable[str]:
    shares = [record[f"{COVERAGE}{name}"] for record in records if f"{COVERAGE}{name}" in record]
    if finite := [value for value in shares if math.isfinite(value)]:
        yield f"KD on {share(fmean(finite))} of the scored tokens"


def _teacher_line(teacher: object) -> Iterable[str]:
    for form, key in TEACHER_KEYS:
        value = _at(teacher, key)
        if value is not None:
            yield form.format(value)


def _at(config: object, key: str) -> object:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config
