"""README.md of an exported model: its card on the Hugging Face Hub."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from nemo_opd.config.evaluation import Questions
from nemo_opd.demo import is_demo
from nemo_opd.files import load_yaml, write_atomically
from nemo_opd.logging.interface import ClosingTable, figure
from nemo_opd.logging.loggers import read
from nemo_opd.logging.metrics import by_set
from nemo_opd.logging.provenance import Provenance, read_provenance
from nemo_opd.logging.records import (
    Records,
    config_text,
    read_config,
    read_hardware,
    run_facts,
    run_name,
    teacher_facts,
    value_at,
)
from nemo_opd.logging.report import render
from nemo_opd.models.folder import split_revision

CARD = "README.md"
_TAGS = ("nemo-opd", "distillation", "knowledge-distillation")
_CURVES = {
    "train/loss": "loss",
    "train/kd": "KD",
    "train/ce": "CE",
    "rollout/reward": "reward",
    "val/bits_per_byte": "bits per byte",
}
"""Heading by metric, for columns of every card that has the metric; scores of questions are added."""
_MOST_ROWS = 10
_TASK = "text-generation"


@dataclass(frozen=True, slots=True)
class Exported:
    """A model in a folder."""

    folder: Path
    what: str
    """Description of its weights, such as `the student after step 100`."""
    step: int
    """Optimizer steps that the weights result from."""
    closing: ClosingTable | None = None
    """Results of these weights; None if they were not measured."""
    suffix: str = ""
    """Distinguishes its title from the final student's."""


def write_card(output_dir: Path, exported: Exported, settings: str | None = None) -> None:
    """Write README.md to the folder of an exported model.

    output_dir: the run's directory; config.yaml, metrics.jsonl, hardware.json and provenance.json are read if they
    exist. settings: YAML to use instead of config.yaml. Raises DataError if one of them is damaged.
    """
    config = read_config(output_dir) if settings is None else load_yaml(settings)
    records = [record for record in read(output_dir / "metrics.jsonl") if record["step"] <= exported.step]
    provenance = read_provenance(output_dir)
    title = f"{run_name(config) or output_dir.name}{exported.suffix}"
    is_adapter = (exported.folder / "adapter_config.json").is_file()
    page = render(
        "card.md",
        metadata=_metadata(config, exported, provenance, title, is_adapter=is_adapter).to_yaml(),
        title=title,
        exported=exported,
        closing=exported.closing or ClosingTable(before=None, after=None),
        confidence=value_at(config, "evaluation.confidence") or Questions.model_fields["confidence"].default,
        is_adapter=is_adapter,
        provenance=provenance,
        teachers=teacher_facts(config, records),
        facts=run_facts(config, read_hardware(output_dir), records),
        curves=_curves(records),
        config_text=config_text(output_dir) if settings is None else settings,
    )
    write_atomically(exported.folder / CARD, page)


def _metadata(
    config: object, exported: Exported, provenance: Provenance | None, title: str, *, is_adapter: bool
) -> ModelCardData:
    fields = {} if provenance is None else provenance.student.card.fields()
    started_from = None if provenance is None or value_at(config, "student.lora") else provenance.started_from
    dataset = hub_name(value_at(config, "data.train.hub.path"))
    return ModelCardData(
        base_model=hub_name(started_from or value_at(config, "student.model")),
        datasets=None if dataset is None else [dataset],
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=_TASK,
        tags=[*_TAGS, *(["on-policy"] if value_at(config, "rollout") else [])],
        model_name=title,
        eval_results=list(_results(config, exported.closing)) or None,
        **fields,
    )


def hub_name(reference: object) -> str | None:
    """Return the name, without a revision, if it is one on the hub; None for a folder or an invalid name."""
    if not isinstance(reference, str) or is_demo(reference) or Path(reference).exists():
        return None
    name, _ = split_revision(reference)
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _results(config: object, closing: ClosingTable | None) -> Iterator[EvalResult]:
    """Yield the results of the student after training."""
    if closing is None:
        return
    if closing.after is not None and closing.after.bits_per_byte is not None:
        dataset = hub_name(value_at(config, "data.validation.hub.path"))
        yield _result(dataset or "validation", "validation text", "bits_per_byte", closing.after.bits_per_byte)
    for row in closing.scores:
        name, _, measure = row.measure.rpartition("/")
        yield _result(name or "questions", name or "questions", measure, row.after.value)


def _result(dataset: str, title: str, measure: str, value: float) -> EvalResult:
    return EvalResult(
        task_type=_TASK,
        dataset_type=dataset,
        dataset_name=title,
        metric_type=measure,
        metric_name=measure.replace("_", " "),
        metric_value=round(value, 4),
    )


def _curves(records: Records) -> list[list[str]]:
    """Return a table with headings: steps with validation or evaluation, or otherwise a few evenly spaced steps."""
    metrics = dict.fromkeys(key for record in records for key in record)
    first_scores = {name: scores[0] for name, scores in by_set(metrics).items()}
    sets = {key: f"{name} {measure}".strip() for name, (measure, key) in first_scores.items()}
    columns = {key: heading for key, heading in (_CURVES | sets).items() if key in metrics}
    measured = [record for record in records if any(key in record for key in (*sets, "val/bits_per_byte"))]
    rows = _evenly(measured if len(measured) > 1 else records)
    if not columns or not rows:
        return []
    return [
        ["step", *columns.values()],
        *([f"{row['step']:,.0f}", *(_value(row, key) for key in columns)] for row in rows),
    ]


def _evenly(records: Records) -> list[Any]:
    """Return at most `_MOST_ROWS` evenly spaced records, including the first and the last."""
    if len(records) <= _MOST_ROWS:
        return list(records)
    return [records[round(i * (len(records) - 1) / (_MOST_ROWS - 1))] for i in range(_MOST_ROWS)]


def _value(record: Any, key: str) -> str:
    value = record.get(key, math.nan)
    return figure(value) if math.isfinite(value) else "–"
