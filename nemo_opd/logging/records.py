"""Facts and tables of a run for its report, from config.yaml, hardware.json, projections.json and metrics.

config.yaml is read as plain YAML instead of a RunConfig, so that runs of other versions can be reported.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from pydantic import TypeAdapter

from nemo_opd.config.evaluation import Questions
from nemo_opd.errors import DataError
from nemo_opd.files import load_yaml, read_data, read_file, storage_errors, write_atomically
from nemo_opd.logging.interface import RunSummary, bits, change, figure, loss_name, share

_Fact = tuple[str, str]
"""Label and value."""
Records = Sequence[Mapping[str, float]]
_Figures = Mapping[str, float]
"""Values by measure."""
SKIPPED = "train/skipped_steps"
NOTHING = "-"
_HARDWARE = "hardware.json"
BASELINE = "baseline"
"""Folder in a run's directory with the same run without teachers."""
_PROJECTIONS = "projections.json"
_TRAINING = (
    *("student.model", "student.optimizer", "student.scheduler", "student.lora", "train.global_batch_size"),
    *("train.max_length", "data.train", "data.packing", "run.seed"),
)
"""Settings that two runs must share for their difference to be the teacher's."""
_RESOLVED = ("type", "offload", "reshard_after_forward", "replicas", "sync_each_micro_batch")
"""Settings whose `auto` preflight replaces."""
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
_KEYS_OF_KD = {
    "loss.type",
    "loss.divergence",
    "loss.temperature",
    "loss.kd_weight",
    "loss.scaling",
    "aggregation.type",
    "aggregation.weights",
    "handoff.type",
}
"""Settings in `_RUN_KEYS` that have no effect without teachers."""
_TEACHER_KEYS = (("{}", "model"), ("{}", "type"), ("weight {}", "weight"), ("{}", "dtype"))
_GROUP_METRIC = re.compile(
    r"val/(?P<table>domain|class|(?:chunk|position)/[^/]+)/(?P<group>.+)/(?P<measure>share|ce|accuracy|bits_per_byte|(?:shared_bits_per_byte|kd)(?:/[^/]+)?)"
)
_NUMBERS = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?)")
_TABLE_TITLES = {
    "domain": "by domain",
    "class": "by class of token",
    "chunk": "by aligned chunk, student : {}",
    "position": "by place in the tokens of {}",
}


@dataclass(frozen=True, slots=True)
class MovedRow:
    """A student token whose weights of teacher tokens changed."""

    token: str
    """Readable text of the token; entries have such texts too."""
    moved: float
    """½ Σ |after − before|: the share of the weight that moved (methods.md §2.8)."""
    before: tuple[tuple[str, float], ...]
    """Teacher tokens with their weights."""
    after: tuple[tuple[str, float], ...]


_BY_TEACHER: TypeAdapter[Mapping[str, Sequence[MovedRow]]] = TypeAdapter(Mapping[str, Sequence[MovedRow]])


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of texts; all columns except the first hold numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def read_config(output_dir: Path) -> dict[str, Any]:
    """Return a run's settings as in its config.yaml, with secrets masked; empty if it does not exist.

    Raises DataError if the file is damaged.
    """
    try:
        config = load_yaml(config_text(output_dir)) or {}
        if not isinstance(config, dict):
            raise ValueError("it has no keys")
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{output_dir / 'config.yaml'} is damaged ({reason}); repair or remove it") from error
    return config


def config_text(output_dir: Path) -> str:
    """Return a run's config.yaml; empty if it does not exist."""
    return read_data(output_dir / "config.yaml").decode()


def value_at(config: object, key: str) -> object:
    """Return the value of a dotted key; None if it does not exist."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def differing_setting(config: object, other: object) -> tuple[str, object, object] | None:
    """Return the key and both values of a setting of the student's training, other than the loss, in which two runs
    differ; None if there is none.
    """
    by_key = (differences(value_at(config, key), value_at(other, key), key) for key in _TRAINING)
    return next(chain.from_iterable(by_key), None)


def differences(current: object, written: object, key: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield the dotted key and both values of each setting that differs.

    An `auto` of `_RESOLVED` in `current` matches the value that a run writes in its place. key: key of both values.
    """
    if isinstance(current, dict) and isinstance(written, dict):
        # A type that was found out may lack keys of `auto`.
        for name in written if current.get("type") == "auto" else {**current, **written}:
            yield from differences(current.get(name), written.get(name), f"{key}.{name}")
    elif isinstance(current, list) and isinstance(written, list):
        if len(current) != len(written) or any(map(any, map(differences, current, written))):
            yield key, current, written
    elif current != written and not (current == "auto" and key.rpartition(".")[2] in _RESOLVED):
        yield key, current, written


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


def write_hardware(run: RunSummary) -> None:
    """Write the device, the models' sharding, the texts and the epochs, which settings such as `cluster.device=auto` do
    not tell.

    A run that continues on other hardware replaces the file.
    """
    hardware = {"device": run.device, "layout": run.layout, "texts": run.data, "steps": run.choices["steps"]}
    write_atomically(run.output_dir / _HARDWARE, (json.dumps(hardware, indent=1) + "\n").encode())


def read_hardware(output_dir: Path) -> dict[str, str]:
    """Return values by label; empty if the file is missing or damaged."""
    try:
        hardware = json.loads(read_file(output_dir / _HARDWARE))
    except (OSError, ValueError, RecursionError):
        return {}
    return {str(label): str(value) for label, value in hardware.items()} if isinstance(hardware, dict) else {}


def write_projections(output_dir: Path, by_teacher: Mapping[str, Sequence[MovedRow]]) -> None:
    """Write the rows of each teacher's projection. Raises StorageError if the file cannot be written."""
    with storage_errors(output_dir):
        write_atomically(output_dir / _PROJECTIONS, _BY_TEACHER.dump_json(by_teacher, indent=1))


def read_projections(output_dir: Path) -> Mapping[str, Sequence[MovedRow]]:
    """Return the rows by teacher; empty if the run learned no projection. Raises DataError if the file is damaged."""
    file = output_dir / _PROJECTIONS
    if not (written := read_data(file)):
        return {}
    try:
        return _BY_TEACHER.validate_json(written)
    except ValueError as error:
        raise DataError(f"{file} is damaged: {str(error).splitlines()[0]}; remove it") from error


def overview(config: object, started_from: str | None = None) -> list[_Fact]:
    """Return the student, teachers, loss and texts in words, for readers who do not know the settings.

    started_from: as in a checkpoint's `Progress`.
    """
    student = str(value_at(config, "student.model") or NOTHING)
    facts = [("student", student if started_from is None else f"{student} with {started_from}")]
    kd, ce = value_at(config, "loss.kd_weight"), value_at(config, "loss.ce_weight")
    if kd and (teachers := _used_teachers(config)):
        models = [f"{value_at(teacher, 'name')} ({value_at(teacher, 'model')})" for teacher in teachers]
        facts.append(("teachers", ", ".join(models)))
        loss = f"loss {_loss_name(value_at(config, 'loss'))}, weight {kd:g}"
        text = f", and the texts (cross-entropy, weight {ce:g})" if ce else ""
        facts.append(("learns from", f"its teachers' predictions ({loss}){text}"))
    else:
        signal = "its rewards (GRPO)" if value_at(config, "loss.type") == "grpo" else "the texts (cross-entropy)"
        facts += [("teachers", "none"), ("learns from", signal)]
    for name, label in (("train", "training texts"), ("validation", "validation texts")):
        source = value_at(config, f"data.{name}")
        kinds: Iterable[object] = source.values() if isinstance(source, dict) else ()
        if names := [_source_name(value) for value in kinds if isinstance(value, list | dict) and value]:
            facts.append((label, names[0]))
    return facts


def _loss_name(loss: object) -> str:
    return loss_name(*(value_at(loss, key) for key in ("type", "divergence", "common_weight")))


def _source_name(value: list[object] | dict[str, object]) -> str:
    """Return a dataset's name on the hub, or the first file and the number of further ones."""
    if isinstance(value, dict):
        return str(value.get("path"))
    return str(value[0]) + (f" and {len(value) - 1} more" if len(value) > 1 else "")


def run_facts(config: object, hardware: Mapping[str, str], records: Records) -> list[_Fact]:
    """Return the settings that are present and not null, the hardware and the number of skipped steps.

    hardware: values by label; they replace settings with the same label.
    """
    unused = set() if _used_teachers(config) else _KEYS_OF_KD
    if value_at(config, "loss.type") == "grpo":
        unused.discard("loss.type")  # learns from rewards
    settings = [
        (label, str(value))
        for label, key in _RUN_KEYS
        if key not in unused and (value := value_at(config, key)) is not None
    ]
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
    """Return a name and one line for each teacher in use."""
    return [_teacher_fact(teacher, records) for teacher in _used_teachers(config)]


def _used_teachers(config: object) -> list[object]:
    """Return the settings of the teachers; empty if KD has no weight, so that no teacher is loaded."""
    teachers = value_at(config, "teachers")
    return teachers if isinstance(teachers, list) and value_at(config, "loss.kd_weight") != 0 else []


def _teacher_fact(teacher: object, records: Records) -> _Fact:
    name = str(value_at(teacher, "name"))
    line = [form.format(value) for form, key in _TEACHER_KEYS if (value := value_at(teacher, key)) is not None]
    if loss := value_at(teacher, "loss"):
        line.append(f"loss {_loss_name(loss)}")
    coverage = f"train/kd_coverage/{name}"
    if finite := [record[coverage] for record in records if math.isfinite(record.get(coverage, math.nan))]:
        line.append(f"KD on {share(fmean(finite))} of the scored tokens")
    return name, ", ".join(line)


def group_tables(records: Records) -> list[TextTable]:
    """Return a table for each kind of group that was validated."""
    validated = [tables for record in records if (tables := figures_by_table(record))]
    if not validated:
        return []
    first, last = validated[0], validated[-1]
    names = sorted(last, key=lambda name: list(_TABLE_TITLES).index(name.partition("/")[0]))
    return [_group_table(name, first.get(name, {}), last[name]) for name in names]


def figures_by_table(record: Mapping[str, float]) -> dict[str, dict[str, dict[str, float]]]:
    """Return figures by table, group and measure."""
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for key, value in record.items():
        if match := _GROUP_METRIC.fullmatch(key):
            groups = tables.setdefault(match["table"], {})
            groups.setdefault(match["group"], {})[match["measure"]] = value
    return tables


def _group_table(name: str, first: Mapping[str, _Figures], last: Mapping[str, _Figures]) -> TextTable:
    teachers = _suffixes(first.values(), "shared_bits_per_byte/")
    distilled = _suffixes(last.values(), "kd/")
    heads = ["", "share of tokens", "bits per byte before", "bits per byte after"]
    if teachers:
        heads += ["over shared bytes before", "over shared bytes after", *(f"teacher {name}" for name in teachers)]
    has_accuracy = any("accuracy" in figures for figures in last.values())
    heads += ["cross-entropy after", *["accuracy after"] * has_accuracy, *(f"KD of {name}" for name in distilled)]
    rows = []
    for group in sorted(last, key=lambda group: -last[group].get("share", 0)):
        start, end = first.get(group, {}), last[group]
        columns = _before_and_after(start, end, "bits_per_byte")
        if teachers:
            columns += _before_and_after(start, end, "shared_bits_per_byte")
            student = start.get("shared_bits_per_byte")
            columns += [_bits(start, f"shared_bits_per_byte/{teacher}", student) for teacher in teachers]
        accuracy = [share(end["accuracy"]) if "accuracy" in end else NOTHING] * has_accuracy
        losses = [_number(end, "ce"), *accuracy, *(_number(end, f"kd/{teacher}") for teacher in distilled)]
        rows.append([group.replace("_", " "), share(end.get("share", 0)), *columns, *losses])
    return TextTable(title_of(name), heads, rows)


def title_of(table: str) -> str:
    """Return the heading of a table."""
    kind, _, teacher = table.partition("/")
    return f"Validation {_TABLE_TITLES[kind].format(teacher)}"


def _suffixes(groups: Iterable[_Figures], prefix: str) -> list[str]:
    """Return the parts of measures after a prefix, in order."""
    return list(dict.fromkeys(key.removeprefix(prefix) for group in groups for key in group if key.startswith(prefix)))


def _number(figures: _Figures, measure: str) -> str:
    return figure(figures[measure]) if measure in figures else NOTHING


def _before_and_after(start: _Figures, end: _Figures, measure: str) -> list[str]:
    return [_bits(start, measure, None), _bits(end, measure, start.get(measure))]


def _bits(figures: _Figures, measure: str, start: float | None) -> str:
    """Format bits per byte, with the change from the student's initial value."""
    value = figures.get(measure)
    if value is None:
        return NOTHING
    return bits(value) + (f" ({change(value / start - 1)})" if start else "")


def markdown(table: TextTable) -> str:
    """Return a table in Markdown."""
    lines = [table.heads, ["---", *["---:"] * (len(table.heads) - 1)], *table.rows]
    body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"## {table.title}\n\n{body}\n"


def by_size(name: str) -> list[tuple[float, str]]:
    """Return a sort key that puts 10 after 9."""
    return [(float(part), "") if i % 2 else (0.0, part) for i, part in enumerate(_NUMBERS.split(name))]
