"""Keys of a run, with the sections `run` and `logging`."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from nemo_opd.config.cluster import Cluster, Handoff, HiddenStatesHandoff
from nemo_opd.config.data import Data
from nemo_opd.config.evaluation import DEFAULT_NEW_TOKENS, Evaluation
from nemo_opd.config.loss import ALMTerm, DivergenceTerm, FunctionTerm, LossTerm, SameVocabTerm, SampledKLTerm, TCADTerm
from nemo_opd.config.model import Student, require_repo
from nemo_opd.config.objective import Aggregation, GRPOLoss, Loss, PKLLoss, Routed, WeightedSum
from nemo_opd.config.reward import Reward
from nemo_opd.config.rollout import Environment, Health, Rollouts
from nemo_opd.config.settings import FilePath, MayChange, Name, Needs, OneOrMore, Settings, UsersCode
from nemo_opd.config.teacher import Teacher
from nemo_opd.config.train import Train

LARGEST_SEED = 2**62
"""PyTorch's generators accept seeds below 2⁶³, and an epoch or a rank is added to the seed."""
ONE_VOCABULARY_TERMS = (SameVocabTerm, TCADTerm)
_SAME_TOKENIZER_TERMS = (*ONE_VOCABULARY_TERMS, SampledKLTerm, FunctionTerm)


class Console(Settings):
    """Display of progress."""

    enabled: bool = True
    """Live progress in a terminal, and occasional lines elsewhere."""
    interval_s: float = Field(10, ge=0)
    """Outside a terminal: seconds between lines of progress. The first, last and validated steps are always printed."""
    memory_table: bool = False
    """With run.dry_run, show the whole memory estimate, part by phase."""


class TensorBoard(Settings):
    """TensorBoard as a destination."""

    enabled: bool = False
    """Write the metrics as events to the run's folder `tensorboard`."""


class Wandb(Settings):
    """Weights & Biases as a destination."""

    enabled: bool = False
    """Log the metrics to Weights & Biases."""
    project: str = "nemo_opd"
    """Project of the run."""
    entity: str | None = None
    """User or team that owns the project; by default the account's."""
    mode: Literal["online", "offline"] = "online"
    """online: send metrics as they come. offline: write them to the run's folder, for `wandb sync`."""


class RolloutFiles(Settings):
    """Files with the student's training samples: rollouts.jsonl."""

    every: int | None = Field(None, ge=1)
    """Steps between batches whose rollouts are written, or null to write none."""
    file_mb: Annotated[float, Needs("every")] = Field(100, gt=0)
    """Size in megabytes at which a file is full and a new one is started."""
    keep_files: Annotated[int, Needs("every")] = Field(10, ge=1)
    """Full files to keep; older ones are removed."""


class Mlflow(Settings):
    """MLflow as a destination."""

    enabled: bool = False
    """Log the metrics, the settings and the results to MLflow."""
    tracking_uri: str | None = None
    """Address of a server, or a database such as `sqlite:////home/me/mlflow.db`; by default MLFLOW_TRACKING_URI, or
    `mlflow.db` in the current directory.
    """
    experiment: str = "nemo_opd"
    """Experiment of the run; created if it does not exist."""


class Trackio(Settings):
    """Trackio as a destination."""

    enabled: bool = False
    """Log the metrics, the settings and the results to trackio."""
    project: str = "nemo_opd"
    """Project of the run."""
    space: str | None = Field(None, pattern=r"^[\w.-]+(/[\w.-]+)?$")
    """Space on the Hugging Face Hub, `user/name`, created if it does not exist; by default a database on this machine,
    for `trackio show`.
    """


class Logging(Settings):
    """Destinations of metrics besides metrics.jsonl."""

    console: Console = Field(default_factory=Console)
    """Progress on the console."""
    tensorboard: TensorBoard = Field(default_factory=TensorBoard)
    """Metrics for TensorBoard."""
    wandb: Wandb = Field(default_factory=Wandb)
    """Metrics for Weights & Biases."""
    rollouts: RolloutFiles = Field(default_factory=RolloutFiles)
    """On-policy: files with the training's rollouts."""
    token_groups: bool = True
    """Also report validation figures by domain, class of token and kind of aligned chunk, from values that validation
    computes anyway.
    """
    mlflow: Mlflow = Field(default_factory=Mlflow)
    """Metrics for MLflow."""
    trackio: Trackio = Field(default_factory=Trackio)
    """Metrics for trackio."""
    continued_texts: int = Field(3, ge=0)
    """Validation texts whose start the student continues before and after training, for an off-policy run's report."""
    gradients_every: int | None = Field(None, ge=1)
    """Steps between comparisons of the KD gradient with the CE gradient: norms and cosine. Such a step runs a forward
    and a backward pass for each.
    """


class PushToHub(Settings):
    """Upload of the trained model to the Hugging Face Hub, with the token from HF_TOKEN or `hf auth login`."""

    repo: str
    """Repository, `user/name`; created if it does not exist."""
    private: bool = True
    """Whether a new repository is private; an existing one is not changed."""
    model: Literal["final", "best"] = "final"
    """Folder of the run that is uploaded."""

    @field_validator("repo")
    @classmethod
    def repo_is_a_name_on_the_hub(cls, value: str) -> str:
        require_repo(value)
        return value


class Run(Settings):
    """Name, directory and start of a run."""

    name: MayChange[Name] = "run"
    """Name of the run in the report and in wandb, and of its folder in `outputs`."""
    output_dir: MayChange[FilePath | None] = None
    """Directory of the run, used as it is; by default `outputs/<name>/<time>`."""
    seed: int = Field(0, ge=0, le=LARGEST_SEED)
    """Seed of data order, sampling, new adapters and dropout."""
    resume: MayChange[Literal["auto", "never"]] = "never"
    """auto: continue from the newest complete checkpoint in `output_dir`, or start if it has none. never: refuse a
    directory with checkpoints, so that a new experiment is not mistaken for a continued one.
    """
    dry_run: MayChange[bool] = False
    """Run all checks, print the plan and stop."""
    baseline: MayChange[bool | FilePath] = False
    """Comparison with the same run without teachers, for the verdict on whether they helped. true: off-policy, first
    train as many steps on the same texts in the same order by cross-entropy alone, in the run's folder `baseline`. A
    folder: the directory of such a run, already finished.
    """
    export_worse: MayChange[bool] = False
    """Off-policy: export and push the student even if validation finds it worse than before training."""
    push_to_hub: MayChange[PushToHub | None] = None
    """Upload the model to the Hugging Face Hub at the end."""
    callbacks: MayChange[OneOrMore[UsersCode]] = ()
    """Your code in the loop, each `package.module:Class` or `package.module:function`; docs/command.md lists what they
    receive.
    """


class RunFields(Settings):
    """Keys of a run and values derived from them; `RunConfig` adds the rules between keys."""

    run: Run = Field(default_factory=Run)
    """Name, directory and start of the run."""
    train: Train
    """Steps, batches and checkpoints."""
    student: Student
    """The model that learns."""
    teachers: tuple[Teacher, ...]
    """The models that the student learns from, as a list; `teachers=GROUP` replaces it, `teachers.0.weight=0.8` changes
    one teacher.
    """
    loss: Loss = Field(default_factory=PKLLoss)
    """Comparison with the teachers that have no loss of their own. If it is a cross-tokenizer loss, teachers with the
    student's tokenizer get same_vocab with the same divergence and temperature (the defaults for alm and uld).
    """
    aggregation: Aggregation = Field(default_factory=WeightedSum)
    """Combination of several teachers into one objective."""
    handoff: Handoff = Field(default_factory=HiddenStatesHandoff)
    """Output that teachers send to the student, and the memory it travels through."""
    data: Data
    """Texts or prompts, and how they are read."""
    rollout: Rollouts | None = None
    """On-policy: how the student samples. null: the student learns from the texts of `data.train`."""
    reward: Reward | None = None
    """Score of a rollout, and of answers in question sets without their own reward."""
    environment: Environment | None = None
    """On-policy: environment that answers between the student's turns. By default the student has one turn."""
    evaluation: MayChange[Evaluation | None] = None
    """Questions that the student is asked during training, and its teachers once if enabled."""
    health: MayChange[Health] = Field(default_factory=Health)
    """On-policy: limits that warn or end the run when they are crossed, if the first steps did not cross them too."""
    cluster: MayChange[Cluster] = Field(default_factory=Cluster)
    """Machines, devices and processes."""
    logging: MayChange[Logging] = Field(default_factory=Logging)
    """Destinations of metrics besides metrics.jsonl."""

    @property
    def active_teachers(self) -> tuple[Teacher, ...]:
        """The teachers in use, self-teachers with the student's model settings; empty if loss.kd_weight=0."""
        if self.loss.kd_weight == 0:
            return ()
        return tuple(
            teacher.with_model_of(self.student) if teacher.is_student else teacher for teacher in self.teachers
        )

    @property
    def packs_documents(self) -> bool:
        """Whether rows hold several documents; conversations and prompts are one sequence each."""
        return self.data.packing and self.rollout is None and not self.data.is_chat

    @property
    def teachers_work_ahead(self) -> bool:
        """Whether teachers read the next batch while the student learns: on other devices, or without computing.

        In one process with the student they take turns. On-policy they cannot: samples taken in advance would come from
        older weights than `rollout.staleness` allows.
        """
        if self.rollout is not None:
            return False
        teachers = [teacher for teacher in self.teachers if not teacher.is_student]
        needs_no_device = not any(teacher.is_computed for teacher in teachers)
        has_own_process = self.cluster.launcher == "ray" and needs_no_device
        return bool(teachers) and (self.cluster.placement == "separate" or has_own_process)

    @property
    def batches_ahead(self) -> int:
        """Number of batches that teachers read ahead of the student."""
        return self.cluster.prefetch if self.active_teachers and self.teachers_work_ahead else 0

    @property
    def active_names(self) -> tuple[str, ...]:
        return tuple(teacher.name for teacher in self.active_teachers)

    @property
    def routing(self) -> Routed | None:
        """The data's assignment of texts to teachers; None if texts are not routed."""
        return self.aggregation if isinstance(self.aggregation, Routed) and self.active_teachers else None

    def new_tokens(self, name: str) -> int:
        """Return the maximum tokens in one turn of an answer to a set of questions."""
        assert self.evaluation is not None
        default = DEFAULT_NEW_TOKENS if self.rollout is None else self.rollout.max_new_tokens
        return self.evaluation.all_sets.get(name, self.evaluation).max_new_tokens or default

    def term(self, teacher: int) -> LossTerm:
        """Return a teacher's distillation term: its own, otherwise the run's or the one for its tokenizer type."""
        entry = self.teachers[teacher]
        if entry.loss is not None:
            return entry.loss
        # GRPO has one term for all tokenizers, so it also applies before the tokenizer's type is known.
        if entry.type == "same_tokenizer" and isinstance(self.loss, ALMTerm):
            return SameVocabTerm()  # alm's temperature is a power of likelihoods, not a divisor of logits
        if entry.type == "same_tokenizer" or isinstance(self.loss, GRPOLoss):
            kind = next((kind for kind in _SAME_TOKENIZER_TERMS if isinstance(self.loss, kind)), SameVocabTerm)
            common = kind if isinstance(self.loss, kind) else DivergenceTerm
            return kind(**self.loss.model_dump(include=set(common.model_fields) - {"type"}))
        return self.loss
