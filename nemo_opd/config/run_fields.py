"""Keys of a whole run."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from nemo_opd.config.aggregation import Aggregation, Routed, WeightedSum
from nemo_opd.config.base import Settings
from nemo_opd.config.cluster import Cluster
from nemo_opd.config.data import Data
from nemo_opd.config.environment import Environment
from nemo_opd.config.evaluation import DEFAULT_NEW_TOKENS, Evaluation
from nemo_opd.config.handoff import Handoff, HiddenStatesHandoff
from nemo_opd.config.health import Health
from nemo_opd.config.hub import require_repo
from nemo_opd.config.logging import Logging
from nemo_opd.config.loss import DivergenceTerm, FunctionTerm, LossTerm, SameVocabTerm, SampledKLTerm, TCADTerm
from nemo_opd.config.model import Student
from nemo_opd.config.objective import GRPOLoss, Loss, PKLLoss
from nemo_opd.config.reward import Reward
from nemo_opd.config.rollout import Rollouts
from nemo_opd.config.teacher import Teacher
from nemo_opd.config.train import Train

LARGEST_SEED = 2**62
"""PyTorch's generators take numbers below 2⁶³, and an epoch or a rank is added to a seed."""
ONE_VOCABULARY_TERMS = (SameVocabTerm, TCADTerm)
_SAME_TOKENIZER_TERMS = (*ONE_VOCABULARY_TERMS, SampledKLTerm, FunctionTerm)


class PushToHub(Settings):
    """Upload of the trained model to the Hugging Face Hub, with the token of HF_TOKEN or `hf auth login`."""

    repo: str
    """Repository, `user/name`; made where it does not exist."""
    private: bool = True
    """Whether a new repository is private; one that exists stays as it is."""
    model: Literal["final", "best"] = "final"
    """Folder of the run that is pushed."""

    @field_validator("repo")
    @classmethod
    def repo_is_a_name_on_the_hub(cls, value: str) -> str:
        require_repo(value)
        return value


class Run(Settings):
    """Name, directory and start of a run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the run in the report and in wandb, and of its folder in `outputs`."""
    output_dir: Path | None = None
    """Used as it is; `outputs/<name>/<time>` when not given."""
    seed: int = Field(0, ge=0, le=LARGEST_SEED)
    """Seed of the order of the data, of sampling, of new adapters and of dropout."""
    resume: Literal["auto", "never"] = "never"
    """auto: continue from the newest complete checkpoint in `output_dir`, or start where there is none."""
    dry_run: bool = False
    """Stop after the checks and print what would run."""
    push_to_hub: PushToHub | None = None
    """Push the model to the Hugging Face Hub at the end."""
    callbacks: tuple[Annotated[str, Field(pattern=r"^[\w.]+:\w+$")], ...] = ()
    """Your code in the loop, `package.module:Class` or `package.module:function` each; what they see is in
    docs/command.md.
    """

    @field_validator("callbacks", mode="before")
    @classmethod
    def one_callback_is_a_list_of_one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("output_dir", mode="before")
    @classmethod
    def output_dir_is_not_empty(cls, value: object) -> object:
        if value == "":  # an unset shell variable, which would put the run into the current directory
            raise ValueError("it is empty; name a directory, or leave the key out for outputs/<name>/<time>")
        return value


class RunFields(Settings):
    """Keys of a run, and what follows from them; `RunConfig` adds the rules by which they fit each other."""

    run: Run = Field(default_factory=Run)
    """Name, directory and start of the run."""
    train: Train
    """Steps, batches and checkpoints."""
    student: Student
    """The model that learns."""
    teachers: tuple[Teacher, ...]
    """The models that it learns from, as a list; `teachers=GROUP` swaps it, `teachers.0.weight=0.8` changes one."""
    loss: Loss = Field(default_factory=PKLLoss)
    """Comparison with the teachers, and the weights of it and of cross-entropy."""
    aggregation: Aggregation = Field(default_factory=WeightedSum)
    """Joining of several teachers into one objective."""
    handoff: Handoff = Field(default_factory=HiddenStatesHandoff)
    """Output that teachers hand over to the student, and the memory by which they do."""
    data: Data
    """Texts or prompts, and how they are read."""
    rollout: Rollouts | None = None
    """On-policy: how the student samples. None: it learns from the texts of `data.train` as they are."""
    reward: Reward | None = None
    """Value of a rollout, and of the answer to a question of a set without a reward."""
    environment: Environment | None = None
    """On-policy: who answers between the student's turns; None: it has one turn."""
    evaluation: Evaluation | None = None
    """Questions that the student is asked now and then, and its teachers once if it says so."""
    health: Health = Field(default_factory=Health)
    """On-policy: limits whose crossing warns or ends the run."""
    cluster: Cluster = Field(default_factory=Cluster)
    """Machines, devices and processes."""
    logging: Logging = Field(default_factory=Logging)
    """Destinations of metrics in addition to metrics.jsonl."""

    @property
    def active_teachers(self) -> tuple[Teacher, ...]:
        """The teachers that are used, self-teachers with the student's model: none where distillation has no weight."""
        if self.loss.kd_weight == 0:
            return ()
        return tuple(
            teacher.with_model_of(self.student) if teacher.is_student else teacher for teacher in self.teachers
        )

    @property
    def packs_documents(self) -> bool:
        """Whether rows are made up of several documents: conversations and prompts have a sequence each."""
        return self.data.packing and self.rollout is None and self.data.messages_key is None

    @property
    def teachers_work_ahead(self) -> bool:
        """Whether teachers read the next batch while the student learns: on other devices than its own, or on none.

        In one process with the student they take turns. What the student samples is not there earlier: sampled ahead it
        would be of weights older than `rollout.staleness` allows.
        """
        if self.rollout is not None:
            return False
        others = [teacher for teacher in self.teachers if not teacher.is_student]
        needs_no_turn = not any(teacher.is_computed for teacher in others)
        is_aside = self.cluster.launcher == "ray" and needs_no_turn
        return bool(others) and (self.cluster.placement == "separate" or is_aside)

    @property
    def batches_ahead(self) -> int:
        """Number of batches that teachers are ahead of the student."""
        return self.cluster.prefetch if self.active_teachers and self.teachers_work_ahead else 0

    @property
    def active_names(self) -> tuple[str, ...]:
        return tuple(teacher.name for teacher in self.active_teachers)

    @property
    def routing(self) -> Routed | None:
        """Routing of texts to teachers by the data; None where there is none."""
        return self.aggregation if isinstance(self.aggregation, Routed) and self.active_teachers else None

    def new_tokens(self, name: str) -> int:
        """Return the most tokens in one turn of an answer to a set of questions."""
        assert self.evaluation is not None
        default = DEFAULT_NEW_TOKENS if self.rollout is None else self.rollout.max_new_tokens
        return self.evaluation.all_sets.get(name, self.evaluation).max_new_tokens or default

    def term(self, teacher: int) -> LossTerm:
        """Return the distillation term of one teacher: its own, else the run's, as its tokenizer allows."""
        entry = self.teachers[teacher]
        if entry.loss is not None:
            return entry.loss
        # Where the tokenizer has yet to be found out, GRPO's loss is of no other.
        if entry.type == "same_tokenizer" or isinstance(self.loss, GRPOLoss):
            kind = next((kind for kind in _SAME_TOKENIZER_TERMS if isinstance(self.loss, kind)), SameVocabTerm)
            common = kind if isinstance(self.loss, kind) else DivergenceTerm
            return kind(**self.loss.model_dump(include=set(common.model_fields) - {"type"}))
        return self.loss
