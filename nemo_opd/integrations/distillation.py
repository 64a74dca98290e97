"""Teachers, alignment and losses for any training loop in PyTorch."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from pydantic import BaseModel
from torch import Tensor
from transformers import PreTrainedModel

from nemo_opd.aggregation import apply_teacher_weights, build_objective, joined_scores, sequence_scores
from nemo_opd.config.model import Parallelism
from nemo_opd.config.run import RunConfig, from_dict
from nemo_opd.config.teacher import OwnIdsTeacher, Teacher
from nemo_opd.data.collate import collate
from nemo_opd.data.columns import run_layout
from nemo_opd.data.row_types import TEXT, Document, read_documents
from nemo_opd.data.samples import SampleMaker
from nemo_opd.distributed.transfer import to_device
from nemo_opd.errors import ConfigError, DataError, ModelError
from nemo_opd.logits.planned import compute_together
from nemo_opd.logits.rows import logit_rows
from nemo_opd.losses.logit_metrics import AccuracyRecorder, plan_bits_per_byte, with_calibration_error
from nemo_opd.models.load import compute_dtype, load_model
from nemo_opd.preflight.corpus import build_sample_maker
from nemo_opd.preflight.model_info import read_model_info
from nemo_opd.preflight.survey import sampled_rows
from nemo_opd.preflight.teachers import plan_teacher, require_templates, settle_tokenizers
from nemo_opd.preflight.warnings import check_conversations, check_positions, conversations_of
from nemo_opd.training.step_metrics import objective_values
from nemo_opd.types import Batch, LossOutput, Metrics, Normalizers

_USED_KEYS: dict[str, set[str] | None] = {
    "student": {"model", "tokenizer", "chat_template", "chat_template_kwargs"},
    "teachers": None,
    "loss": None,
    "aggregation": None,
    "data": {
        *("text_key", "messages_key", "prompt_key", "completion_key", "tools_key"),
        *("learned_turns", "append_eos", "special_tokens"),
    },
    "train": {"max_length"},
}
"""Sections that have an effect, each with the keys that do, or None for all keys."""


class Distillation:
    """The teachers of a student that another training loop trains, and the loss against them.

    Each process has all teachers, unsharded, on its device.
    """

    def __init__(self, settings: Mapping[str, Any], *, device: str | torch.device = "cpu") -> None:
        """Read all tokenizers and load the teachers.

        settings: `student`, `teachers`, `loss`, `aggregation`, `data` and `train.max_length`, as for `nemo_opd.distil`;
        student.model provides the student's tokenizer and configuration. Raises an OPDError if settings are invalid or
        need nemo_opd's own loop, or if a model cannot be used.
        """
        self.config = config = settle_tokenizers(read_settings(settings), "cpu")
        self.device = torch.device(device)
        info = read_model_info(config.student, "student", "cpu")
        teachers = [read_model_info(model, f"teachers.{i}", "cpu") for i, model in enumerate(config.active_teachers)]
        require_templates(config, info, teachers)
        for warning in check_positions(config, info, teachers):
            warnings.warn(warning, stacklevel=2)
        plans = [plan_teacher(config, i, info, teacher) for i, teacher in enumerate(teachers)]
        self.tokenizer, self.vocab_size = info.tokenizer, info.vocab_size
        self._infos = info, teachers
        make_sample = build_sample_maker(config, info, teachers, is_chat=config.data.is_chat)
        self.collator = Collator(make_sample, run_layout(config).columns)
        self._teacher_vocab_sizes = [plan.vocab_size for plan in plans]
        self._objective = build_objective(
            config,
            [plan.projection for plan in plans],
            student_vocab_size=self.vocab_size,
            teacher_vocab_sizes=self._teacher_vocab_sizes,
        )
        self._teachers = [self._load(i) for i in range(len(teachers))]

    def check(self, dataset: Any, key: str = "train_dataset") -> None:
        """Warn if chat templates omit parts of some conversations of a dataset, which must have a length and indices.

        key: name of the dataset in messages. Raises DataError if the student would learn a message without its calls or
        its text.
        """
        if not self.config.data.is_chat:
            return
        rows = [dataset[i] for i in sampled_rows(len(dataset))]
        conversations = conversations_of(self.collator.documents(rows))
        for warning in check_conversations(self.config, conversations, *self._infos, key=key, are_learned=True):
            warnings.warn(warning, stacklevel=2)

    def _load(self, i: int) -> PreTrainedModel:
        settings = self.config.active_teachers[i]
        dtype = compute_dtype(settings.dtype, self.device.type)
        attention = settings.attn_implementation
        model = load_model(settings.reference, dtype, key=f"teachers.{i}.model", attn_implementation=attention)
        return model.eval().requires_grad_(False).to(self.device)

    def to(self, device: str | torch.device) -> Self:
        """Move the teachers, in their dtype, to a device."""
        self.device = torch.device(device)
        for teacher in self._teachers:
            teacher.to(self.device)  # type: ignore[arg-type]
        return self

    def counts(self, batches: Sequence[Batch]) -> Tensor:
        """Count the normalizers of a global batch's losses: float64 [counts], to be summed over processes."""
        return torch.tensor([self._objective.counts(batch) for batch in batches], dtype=torch.float64).sum(0)

    def normalizers(self, counts: Tensor) -> Normalizers:
        """Return the normalizers of a global batch from the sum of its `counts`."""
        return self._objective.normalizers_of(counts.tolist())

    @torch.no_grad()
    def teacher_logits(self, batch: Batch) -> list[Tensor]:
        """Return each teacher's logits [B, T, W], unshifted."""
        ids = [rows.tokens.ids.to(self.device) for rows in batch.teachers]
        return [
            teacher(input_ids=teacher_ids, use_cache=False).logits
            for teacher, teacher_ids in zip(self._teachers, ids, strict=True)
        ]

    def loss(
        self,
        student_logits: Tensor,
        batch: Batch,
        normalizers: Normalizers | None = None,
        *,
        teacher_logits: Sequence[Tensor] | None = None,
        for_validation: bool = False,
    ) -> LossOutput:
        """Return the batch's share of the loss of a global batch, ce_weight · CE + kd_weight · KD, and its metrics.

        student_logits: [B, S, V] for `batch.student.ids`, unshifted. normalizers: for the global batch, if `batch` is
        only a part of it. teacher_logits: result of `teacher_logits`, by default computed now. for_validation: add
        bits per byte and accuracy to the metrics. Raises ModelError if the logits have another vocabulary.
        """
        if student_logits.shape[-1] < self.vocab_size:
            raise ModelError(
                f"the student's logits have {student_logits.shape[-1]} columns, but the tokenizer of student.model="
                f"{self.config.student.model} has {self.vocab_size} tokens; name the model that is trained"
            )
        if normalizers is None:
            normalizers = self.normalizers(self.counts([batch]))
        if teacher_logits is None:
            teacher_logits = self.teacher_logits(batch)
        with torch.autocast(student_logits.device.type, enabled=False):
            weighted = self._with_teacher_weights(batch, teacher_logits)
            divisors = self._objective.divisors(weighted)
            rows = [logit_rows(logits) for logits in teacher_logits]
            planned = self._objective.plan(
                student_logits, rows, to_device(weighted, self.device), divisors, normalizers
            )
            if for_validation:
                tokens, size = to_device(batch.student, self.device), self.vocab_size
                planned.append(plan_bits_per_byte(student_logits, tokens, vocab_size=size))
                planned.append(AccuracyRecorder.of(student_logits, tokens, vocab_size=size).plan)
            return compute_together(planned)

    def _with_teacher_weights(self, batch: Batch, teacher_logits: Sequence[Tensor]) -> Batch:
        """Return the batch, on the host, with each teacher's weight in each sequence."""
        aggregation, teachers = self.config.aggregation, self.config.active_teachers
        scores = []
        if (score := aggregation.score) is not None:
            sides = zip(teacher_logits, batch.teachers, self._teacher_vocab_sizes, strict=True)
            for logits, rows, size in sides:
                tokens = to_device(rows.tokens, self.device)
                scores.append(joined_scores([sequence_scores(logits, tokens, score=score, vocab_size=size)]))
        return apply_teacher_weights(aggregation, batch, scores, priors=[teacher.weight for teacher in teachers])

    def values(self, metrics: Metrics) -> dict[str, float]:
        """Return the values of merged metrics under their logged names: `loss`, `ce`, `kd`, `kd/<teacher>`, …"""
        values = objective_values(self.config, with_calibration_error(metrics), 1.0, "")
        return {name.removeprefix("/"): value for name, value in values.items()}


@dataclass(frozen=True)
class Collator:
    """Collator from rows, a list of dicts, to the student's `input_ids` and a `batch`, a `nemo_opd.types.Batch`.

    It is picklable, for the processes of a DataLoader. Raises DataError without rows, or if a row has no text or half
    of a surrogate pair.
    """

    make_sample: SampleMaker
    columns: Mapping[str, str]
    """Our names of columns, keyed by the dataset's names."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not rows:
            raise DataError("a batch needs at least one row")
        batch = collate([self.make_sample(document) for document in self.documents(rows)])
        return {"input_ids": batch.student.ids, "batch": batch}

    def documents(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[Document]:
        """Return the documents of rows. Raises DataError if a row has no text or half of a surrogate pair."""
        return read_documents(_Rows(rows, self.columns), list(range(len(rows))))


@dataclass(frozen=True)
class _Rows:
    rows: Sequence[Mapping[str, Any]]
    columns: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, indices: list[int]) -> dict[str, list[Any]]:
        try:
            columns = {ours: [self.rows[i][theirs] for i in indices] for theirs, ours in self.columns.items()}
        except KeyError as error:
            raise DataError(
                f"a row has no column {error}, but {', '.join(map(repr, self.rows[0])) or 'none'}; name it as "
                "data.text_key or data.messages_key, and keep the dataset as it is: texts are tokenized here, for all "
                "models (with TRL: dataset_kwargs={'skip_prepare_dataset': True})"
            ) from error
        for ours, theirs in self.columns.items():
            _require_utf8(columns[ours], theirs)
        for text in columns.get(TEXT, ()):
            if not isinstance(text, str):
                raise DataError(f"a row's text is {text!r} ({type(text).__name__}); correct it, or leave the row out")
        return columns


def _require_utf8(values: Sequence[Any], column: str) -> None:
    """Raise DataError if a value, or a text nested in it, contains half of a surrogate pair."""
    for value in values:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            passage = text[max(0, error.start - 40) : error.end]
            raise DataError(
                f"a row's {column} has half of a surrogate pair (\\ud800 to \\udfff), which is not a character, at the "
                f"end of {passage!r}; correct it, or leave the row out"
            ) from error


def read_settings(settings: Mapping[str, Any]) -> RunConfig:
    """Return a run's config from settings in the form of `nemo_opd.distil`.

    Raises ConfigError if settings are invalid, are decided by the trainer, or need nemo_opd's own loop.
    """
    for key in _without_effect(settings):
        raise ConfigError(f"{key}: the trainer's own arguments, model and datasets decide this here; leave it out")
    train, data = settings.get("train", {}), settings.get("data", {})
    if isinstance(train, Mapping):  # validation reports other types
        train = {"max_steps": 1, "global_batch_size": 1, "micro_batch_size": 1, **train}
    if isinstance(data, Mapping):
        is_chat = data.get("messages_key") or data.get("prompt_key")  # conversations are never packed
        data = {**data, **({} if is_chat else {"packing": False}), "cache": False}
    config = from_dict({**settings, "train": train, "data": data})
    for key, reason in _unsupported(config):
        raise ConfigError(f"{key}: {reason}; leave it out, or use nemo_opd.distil")
    return config


def _without_effect(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a run that have no effect here; validation reports misspelled keys."""
    for section in (name for name in settings if name in RunConfig.model_fields):
        keys = _USED_KEYS.get(section, set())
        if section not in _USED_KEYS:
            yield section
        elif keys is not None and isinstance(settings[section], Mapping):
            model = RunConfig.model_fields[section].annotation
            assert isinstance(model, type)
            assert issubclass(model, BaseModel)
            yield from (f"{section}.{key}" for key in settings[section] if key in model.model_fields.keys() - keys)


def _unsupported(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for settings that need nemo_opd's own loop."""
    if config.loss.scaling == "dynamic":
        yield "loss.scaling=dynamic", "its averages would not be in the trainer's checkpoints"
    if config.aggregation.type == "select_teacher":
        yield "aggregation.type=select_teacher", "all teachers must have read a global batch before its first gradient"
    for i, teacher in enumerate(config.active_teachers):
        yield from ((f"teachers.{i}.{key}", reason) for key, reason in _unsupported_of_teacher(teacher))


def _unsupported_of_teacher(teacher: Teacher) -> Iterator[tuple[str, str]]:
    if teacher.is_student:
        yield f"weights={teacher.weights}", "the trainer owns the student's weights"
    elif not teacher.is_computed:
        yield f"type={teacher.type}", "only models that are loaded in this process can be teachers here"
    if teacher.context is not None:
        yield "context", "teachers read the same text as the student here"
    if isinstance(teacher, OwnIdsTeacher) and teacher.projection_lr is not None:
        yield f"projection_lr={teacher.projection_lr:g}", "the trainer's optimizer has the student's weights only"
    if teacher.parallelism != Parallelism():
        yield "parallelism", "each process has unsharded teachers here"
    for key in ("compile", "fused_layers", "offload"):
        if (value := getattr(teacher, key)) not in (False, "auto"):
            yield f"{key}={str(value).lower()}", "teachers are transformers' own models here"
