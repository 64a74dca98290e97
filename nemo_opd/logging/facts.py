"""What config.yaml says about a run, in a person's words.

It is read as plain YAML and not as a RunConfig: a later version, whose settings differ, can make a report again.
"""

from collections.abc import Iterable

from nemo_opd.config.evaluation import Questions

Fact = tuple[str, str]

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


def run_facts(config: object) -> list[Fact]:
    """Label and value of the settings that are there and not null."""
    return [(label, str(value)) for label, key in RUN_KEYS if (value := _at(config, key)) is not None]


def teacher_facts(config: object) -> list[Fact]:
    """Name and one line for each teacher."""
    teachers = _at(config, "teachers")
    if not isinstance(teachers, list):
        return []
    return [(str(_at(teacher, "name")), ", ".join(_teacher_line(teacher))) for teacher in teachers]


def _teacher_line(teacher: object) -> Iterable[str]:
    for form, key in TEACHER_KEYS:
        value = _at(teacher, key)
        if value is not None:
            yield form.format(value)


def _at(config: object, key: str) -> object:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config
