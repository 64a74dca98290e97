"""Teachers, alignment and losses for any training loop in PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nemo_opd.aggregation import ObjectiveTerms, apply_teacher_weights, build_parts, joined_scores, sequence_scores
from nemo_opd.distributed.transfer import to_device
from nemo_opd.errors import ModelError
from nemo_opd.integrations.collator import Collator
from nemo_opd.integrations.settings import read_settings
from nemo_opd.logits.planned import compute_together
from nemo_opd.logits.rows import logit_rows
from nemo_opd.losses.accuracy import plan_accuracy, with_calibration_error
from nemo_opd.losses.bits_per_byte import plan_bits_per_byte
from nemo_opd.models.load import compute_dtype, load_model
from nemo_opd.training.inputs import layout_of
from nemo_opd.training.model_info import read_model_info
from nemo_opd.training.preflight_warnings import check_positions
from nemo_opd.training.sample_makers import build_sample_maker
from nemo_opd.training.step_metrics import objective_values
from nemo_opd.training.survey import sampled_rows
from nemo_opd.training.teacher_plan import plan_teacher, require_templates
from nemo_opd.training.template_findings import check_conversations, conversations_of
from nemo_opd.types import Batch, LossOutput, Metrics, Normalizers


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
        self.config = config = read_settings(settings)
        self.device = torch.device(device)
        info = read_model_info(config.student, "student", "cpu")
        teachers = [read_model_info(model, f"teachers.{i}", "cpu") for i, model in enumerate(config.active_teachers)]
        require_templates(config, info, teachers)
        for warning in check_positions(config, info, teachers):
            warnings.warn(warning, stacklevel=2)
        plans = [plan_teacher(config, i, info, teacher) for i, teacher in enumerate(teachers)]
        self.tokenizer, self.vocab_size = info.tokenizer, info.vocab_size
        self._infos = info, teachers
        self.collator = Collator(build_sample_maker(config, info, teachers), layout_of(config).columns)
        self._teacher_vocab_sizes = [plan.vocab_size for plan in plans]
        self._parts = build_parts(
            config,
            [plan.projection for plan in plans],
            student_vocab_size=self.vocab_size,
            teacher_vocab_sizes=self._teacher_vocab_sizes,
        )
        self._objective = ObjectiveTerms(config.loss, self._parts, self.vocab_size)
        self._teachers = [self._load(i) for i in range(len(teachers))]

    def check(self, dataset: Any, key: str = "train_dataset") -> None:
        """Warn if chat templates omit parts of some conversations of a dataset, which must have a length and indices.

        key: name of the dataset in messages. Raises DataError if the student would learn a message without its calls or
        its text.
        """
        if self.config.data.messages_key is None:
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
        return torch.tensor([self._parts.counts(batch) for batch in batches], dtype=torch.float64).sum(0)

    def normalizers(self, counts: Tensor) -> Normalizers:
        """Return the normalizers of a global batch from the sum of its `counts`."""
        return self._parts.normalizers_of(counts.tolist())

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
            divisors = self._parts.divisors(weighted)
            rows = [logit_rows(logits) for logits in teacher_logits]
            planned = self._objective.plan(
                student_logits, rows, to_device(weighted, self.device), divisors, normalizers
            )
            if for_validation:
                tokens, size = to_device(batch.student, self.device), self.vocab_size
                measures = (plan_bits_per_byte, plan_accuracy)
                planned += [measure(student_logits, tokens, vocab_size=size) for measure in measures]
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
