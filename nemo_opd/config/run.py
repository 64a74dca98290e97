"""Settings of a run, with the rules between them."""

from collections.abc import Mapping
from typing import Any, Self, TypeVar

from pydantic import ValidationError, model_validator

from nemo_opd.config.objective import AveragedLogits, GRPOLoss, Routed, SelectTeacher, WeightedSum
from nemo_opd.config.run_checks import check_chosen_metrics, check_contexts, check_effects
from nemo_opd.config.run_fields import ONE_VOCABULARY_TERMS, RunFields
from nemo_opd.config.sampling_checks import check_off_policy, check_on_policy
from nemo_opd.config.settings import Settings, explain_all
from nemo_opd.config.short_form import long_form
from nemo_opd.config.teacher import CrossTokenizerTeacher, OwnIdsTeacher
from nemo_opd.errors import ConfigError

S = TypeVar("S", bound=Settings)
_LEARNING = ("p_kl", "h_kl")
"""Losses with a gradient for the weights of a projection."""


class RunConfig(RunFields):
    """All settings of a run, as in its resolved config.yaml."""

    @model_validator(mode="after")
    def teachers_have_unique_names(self) -> Self:
        if not self.teachers:
            raise ValueError(
                "teachers=[]: the list is empty; name at least one teacher, such as teachers=[MODEL]. To learn only "
                "from the texts or the rewards, keep the teachers and write loss.kd_weight=0: none is loaded then"
            )
        names = [teacher.name for teacher in self.teachers]
        if "student" in names:
            raise ValueError(
                f"teachers.{names.index('student')}.name=student: the student has this name; write another"
            )
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"teachers: {names.count(name)} teachers are named {name!r}; metrics need one name each"
                )
        return self

    @model_validator(mode="after")
    def asked_teachers_compute_answers(self) -> Self:
        are_asked = self.evaluation is not None and self.evaluation.teachers
        for i, teacher in enumerate(self.active_teachers):
            if teacher.cache is not None and self.rollout is not None:
                raise ValueError(
                    f"teachers.{i}.cache={teacher.cache}: a cached teacher ({teacher.name}) has answers only for "
                    "stored texts, and the student samples new ones; name a model, or leave rollout out"
                )
            if are_asked and not teacher.is_computed:
                raise ValueError(
                    f"evaluation.teachers=true: {teacher.name} is cached or served, which gives only "
                    "log-probabilities; write evaluation.teachers=false"
                )
            if are_asked and teacher.offload == "layers":
                raise ValueError(
                    f"teachers.{i}.offload=layers: with evaluation.teachers=true all layers of {teacher.name} would be "
                    "loaded for every token of an answer; write evaluation.teachers=false, or another offload"
                )
        return self

    @model_validator(mode="after")
    def losses_suit_vocabularies_and_projections(self) -> Self:
        for i, teacher in enumerate(self.active_teachers):
            term = teacher.loss or self.loss
            if isinstance(teacher, CrossTokenizerTeacher) and isinstance(term, (*ONE_VOCABULARY_TERMS, GRPOLoss)):
                key = f"teachers.{i}.loss.type" if teacher.loss else "loss.type"
                divergence = getattr(term, "divergence", "forward_kl")
                override = "" if divergence == "forward_kl" else f" loss.divergence={divergence}"
                raise ValueError(
                    f"{key}={term.type} compares equal vocabularies, but teachers.{i} ({teacher.name}) is of type "
                    f"cross_tokenizer; use loss=p_kl{override}, write teachers.{i}.loss.type=p_kl, or type: "
                    "same_tokenizer if it has the student's tokenizer"
                )
            if isinstance(teacher, OwnIdsTeacher) and teacher.projection_lr and self.term(i).type not in _LEARNING:
                raise ValueError(
                    f"teachers.{i}.projection_lr={teacher.projection_lr:g}: loss.type={self.term(i).type} does not "
                    "depend on the weights of the projection, so nothing would be learned; write "
                    f"teachers.{i}.loss.type=p_kl or h_kl, or leave projection_lr out"
                )
        return self

    @model_validator(mode="after")
    def weights_leave_something_to_learn(self) -> Self:
        if self.active_teachers and not any(teacher.weight for teacher in self.teachers):
            raise ValueError(
                "every teacher's weight is 0, so all would be loaded and nothing learned from them; raise one, or "
                "write loss.kd_weight=0 to train without teachers"
            )
        if self.loss.kd_weight == self.loss.ce_weight == 0 and not isinstance(self.loss, GRPOLoss):
            raise ValueError("loss.kd_weight and loss.ce_weight are both 0, so there is nothing to learn; raise one")
        for key in ("kd_weight", "ce_weight"):
            if self.logging.gradients_every is not None and getattr(self.loss, key) == 0:
                raise ValueError(
                    f"logging.gradients_every={self.logging.gradients_every} compares the KD gradient with the CE "
                    f"gradient, but loss.{key}=0; raise it, or write logging.gradients_every=null"
                )
        return self

    @model_validator(mode="after")
    def aggregation_needs_several_teachers(self) -> Self:
        if len(self.teachers) == 1 and (setting := self._needs_several_teachers()):
            raise ValueError(
                f"{setting} needs several teachers, but there is one ({self.teachers[0].name}); name more teachers, or "
                "write aggregation=weighted_sum"
            )
        return self

    def _needs_several_teachers(self) -> str | None:
        aggregation = self.aggregation
        if not isinstance(aggregation, WeightedSum):
            return f"aggregation.type={aggregation.type}"
        if aggregation.weights != "static":
            return f"aggregation.weights={aggregation.weights}"
        return "aggregation.vocabulary_scaling=true" if aggregation.vocabulary_scaling else None

    @model_validator(mode="after")
    def averaged_logits_needs_one_vocabulary_and_loss(self) -> Self:
        for i, teacher in enumerate(self.teachers if isinstance(self.aggregation, AveragedLogits) else ()):
            if teacher.type == "cross_tokenizer":
                raise ValueError(
                    "aggregation.type=averaged_logits averages the columns of one vocabulary, but "
                    f"teachers.{i} ({teacher.name}) is of type cross_tokenizer; use aggregation=weighted_sum, or "
                    "remove that teacher"
                )
            if teacher.loss is not None:
                raise ValueError(
                    f"teachers.{i}.loss.type={teacher.loss.type}: aggregation.type=averaged_logits compares with all "
                    "teachers at once, so a teacher cannot have its own loss; set it under loss"
                )
        return self

    @model_validator(mode="after")
    def weights_of_teachers_have_an_effect(self) -> Self:
        """Reject weights of teachers that are selected, or compared by a softmax, if such a weight changes nothing."""
        picks_one = isinstance(self.aggregation, SelectTeacher | Routed)
        if isinstance(self.aggregation, AveragedLogits) or not (picks_one or self.aggregation.score is not None):
            return self
        first = self.teachers[0]
        for i, teacher in enumerate(self.teachers):
            if teacher.weight == 0:
                raise ValueError(
                    f"teachers.{i}.weight=0: {self._needs_several_teachers()} would give texts to {teacher.name}, and "
                    "nothing would be learned from it; remove it, or give it a weight"
                )
            if picks_one and teacher.weight != first.weight:
                raise ValueError(
                    f"teachers.{i}.weight={teacher.weight:g}: with aggregation.type={self.aggregation.type} a text has "
                    f"one teacher, whose weight has no effect, so it cannot differ from teachers.0.weight="
                    f"{first.weight:g}; make them equal, or use aggregation=weighted_sum"
                )
        return self

    @model_validator(mode="after")
    def separate_placement_needs_a_frozen_teacher(self) -> Self:
        teachers, placement = self.active_teachers, self.cluster.placement
        if placement == "separate" and teachers and all(teacher.is_student for teacher in teachers):
            raise ValueError(
                f"cluster.placement=separate: every teacher has the student's weights (teachers.0.weights="
                f"{teachers[0].weights}) and runs in the student's processes, so none needs separate devices; write "
                "cluster.placement=colocated"
            )
        return self

    @model_validator(mode="after")
    def routed_needs_a_separate_column(self) -> Self:
        data, aggregation = self.data, self.aggregation
        if not isinstance(aggregation, Routed):
            return self
        for name in ("train", "validation"):
            if getattr(data, name).text_files:
                raise ValueError(
                    f"data.{name}.text_files have no column {aggregation.key!r} (aggregation.key) that names a "
                    "teacher; give arrow_files, parquet_files, jsonl_files or hub"
                )
        for key, column in data.document_columns:
            if column == aggregation.key:
                raise ValueError(
                    f"aggregation.key={aggregation.key} is the column of data.{key} too; name the one with the teacher"
                )
        return self

    @model_validator(mode="after")
    def push_of_best_needs_keep_best(self) -> Self:
        push = self.run.push_to_hub
        if push is not None and push.model == "best" and self.train.keep_best is None:
            raise ValueError(
                "run.push_to_hub.model=best: the run keeps no best checkpoint; set train.keep_best, or write "
                "run.push_to_hub.model=final"
            )
        return self

    @model_validator(mode="after")
    def settings_suit_on_or_off_policy(self) -> Self:
        check = check_off_policy if self.rollout is None else check_on_policy
        check(self)
        return self

    @model_validator(mode="after")
    def settings_have_an_effect(self) -> Self:
        check_contexts(self)
        check_effects(self)
        check_chosen_metrics(self)
        return self


def from_dict(data: Mapping[str, Any]) -> RunConfig:
    """Validate a run's settings. Raises ConfigError with a line for each problem."""
    return validated(data, RunConfig)


def validated(data: Mapping[str, Any], model: type[S]) -> S:
    """Validate plain data. Raises ConfigError with a line for each problem."""
    if issubclass(model, RunFields):
        data = long_form(data)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(explain_all(error.errors(), data, model))) from None
