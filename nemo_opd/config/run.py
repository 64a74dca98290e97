"""The settings of a whole run."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from nemo_opd.config.aggregation import WeightedSum
from nemo_opd.config.base import Settings
from nemo_opd.config.cluster import Cluster
from nemo_opd.config.data import Data
from nemo_opd.config.handoff import LogitsHandoff
from nemo_opd.config.logging import Logging
from nemo_opd.config.loss import DivergenceTerm, Loss, LossTerm, PKLLoss, SameVocabTerm
from nemo_opd.config.model import Student
from nemo_opd.config.teacher import CrossTokenizerTeacher, Teacher
from nemo_opd.config.train import Train


class Run(Settings):
    name: str = Field("run", pattern=r"^[A-Za-z0-9_.-]+$")
    output_dir: Path | None = None
    """Used as it is; `outputs/<name>/<time>` when not given."""
    seed: int = Field(0, ge=0)
    resume: Literal["auto", "never"] = "never"
    """auto: continue from the newest complete checkpoint in `output_dir`, or start where there is none."""
    dry_run: bool = False
    """Stop after the checks and print what would run."""

    @field_validator("output_dir", mode="before")
    @classmethod
    def output_dir_is_not_empty(cls, value: object) -> object:
        if value == "":  # an unset shell variable, which would put the run into the current directory
            raise ValueError("it is empty; name a directory, or leave the key out for outputs/<name>/<time>")
        return value


class RunConfig(Settings):
    """Everything a run depends on. The resolved config.yaml of a run is one of these."""

    run: Run = Field(default_factory=Run)
    train: Train
    student: Student
    teachers: tuple[Teacher, ...] = Field(min_length=1)
    loss: Loss = Field(default_factory=PKLLoss)
    aggregation: WeightedSum = Field(default_factory=WeightedSum)
    handoff: LogitsHandoff = Field(default_factory=LogitsHandoff)
    data: Data
    cluster: Cluster = Field(default_factory=Cluster)
    logging: Logging = Field(default_factory=Logging)

    @model_validator(mode="after")
    def teacher_names_are_unique(self) -> Self:
        names = [teacher.name for teacher in self.teachers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"teachers: {names.count(name)} teachers are named {name!r}; metrics need one name each"
                )
        return self

    @model_validator(mode="after")
    def cross_tokenizer_teachers_need_a_cross_tokenizer_loss(self) -> Self:
        for i, teacher in enumerate(self.teachers):
            if isinstance(teacher, CrossTokenizerTeacher) and self.term(i).type == "same_vocab":
                key = f"teachers.{i}.loss.type" if teacher.loss else "loss.type"
                raise ValueError(
                    f"{key}=same_vocab compares equal vocabularies, but teachers.{i} ({teacher.name}) is of type "
                    "cross_tokenizer; use loss=p_kl, or type: same_tokenizer if it has the student's tokenizer"
                )
        return self

    @model_validator(mode="after")
    def something_is_trained_on(self) -> Self:
        if self.loss.ce_weight > 0:
            return self
        if self.loss.kd_weight == 0:
            raise ValueError("loss.kd_weight and loss.ce_weight are both 0, so there is nothing to learn; raise one")
        if not any(teacher.weight for teacher in self.teachers):
            raise ValueError(
                "loss.ce_weight and the weight of every teacher are 0, so there is nothing to learn; raise one"
            )
        return self

    @property
    def active_teachers(self) -> tuple[Teacher, ...]:
        """The teachers that are loaded: none where distillation has no weight."""
        return self.teachers if self.loss.kd_weight > 0 else ()

    def term(self, teacher: int) -> LossTerm:
        """The distillation term of one teacher: its own, else the run's, as its tokenizer allows."""
        entry = self.teachers[teacher]
        if entry.loss is not None:
            return entry.loss
        if entry.type == "same_tokenizer":
            common = SameVocabTerm if isinstance(self.loss, SameVocabTerm) else DivergenceTerm
            return SameVocabTerm(**self.loss.model_dump(include=set(common.model_fields) - {"type"}))
        return self.loss
