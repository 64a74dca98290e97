"""Evaluation on questions with checkable answers."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_serializer, field_validator, model_validator

from nemo_opd.config.cluster import EvaluationCluster
from nemo_opd.config.data import PromptColumns, ValidationSource
from nemo_opd.config.model import ModelSource, Parallelism
from nemo_opd.config.reward import Reward, is_paid_by_environment
from nemo_opd.config.rollout import Environment, HFRollout, RolloutBase, Rollouts, TokenSampling
from nemo_opd.config.settings import NAME, Excludes, FilePath, Frozen, Name, OneOrMore, Settings
from nemo_opd.config.teacher import Context, Template

DEFAULT_NEW_TOKENS = 256
"""Maximum tokens of an answer if no setting gives them."""
_MEASURES = ("greedy", "response_length", "truncation_rate", "failed_rewards")


class Questions(TokenSampling):
    """Sampling and scoring of answers."""

    data: ValidationSource = Field(default_factory=ValidationSource)
    """Questions, with the same columns as `data.train`; scored by `reward`."""
    n: int = Field(1, ge=1)
    """Sampled answers per question."""
    k: tuple[int, ...] = (1,)
    """Values of k for pass@k and maj@k, at most n."""
    greedy: bool = True
    """Also decode one greedy answer per question."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Maximum tokens in one turn of the student; by default `rollout.max_new_tokens`, or 256 without rollouts."""
    stop: OneOrMore[str] = ()
    r"""Texts that end an answer and are not part of it, such as `["\n\nQuestion:"]`. Not with an environment."""
    level_key: str | None = None
    """The column with a question's difficulty or kind, by which the report also shows accuracy."""
    correct_reward: float = 1.0
    """Smallest reward of a correct answer, for pass@k, maj@k and greedy; mean@n averages the rewards."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """Confidence level of the intervals."""

    @field_validator("k", mode="before")
    @classmethod
    def one_k_is_a_list_of_one(cls, value: object) -> object:
        return (value,) if isinstance(value, int) else value

    @model_validator(mode="after")
    def k_is_at_most_n(self) -> Self:
        if beyond := [k for k in self.k if not 1 <= k <= self.n]:
            way_out = "raise n" if beyond[0] > 0 else "write 1 or more"
            raise ValueError(f"k={list(self.k)}: {beyond[0]} of n={self.n} answers cannot be taken; {way_out}")
        return self


class SetSource(ValidationSource):
    """Source of the questions of a set, and their columns."""

    text_key: Annotated[str | None, Excludes("messages_key"), Excludes("prompt_key"), Excludes("tools_key")] = None
    """The column with a question as a text to continue; by default `data.text_key`."""
    messages_key: str | None = None
    """The column with a question as a conversation; by default `data.messages_key`, unless `text_key` is set."""
    prompt_key: PromptColumns = ()
    """Columns with a question as a user's message; by default `data.prompt_key`, unless another column is named."""
    tools_key: str | None = None
    """The column with the tools that a conversation may call."""


class QuestionSet(Questions):
    """A named set of questions, with `evaluation` as its defaults."""

    data: SetSource
    """Questions."""
    reward: Reward | None = None
    """Reward of an answer; by default the reward of all sets."""
    prompt: Template | None = None
    """Text that replaces the question or, in a conversation, the user's last message. `{prompt}` stands for the
    replaced text, other names in braces for columns, as in `{prompt}\\n\\nPut the answer in \\\\boxed{{}}.`
    """
    system_prompt: Template | None = None
    """System message that replaces the conversation's; may name columns as `prompt` does."""

    @property
    def context(self) -> Context | None:
        """The prompt that replaces the row's; None if the row's own is used."""
        if self.prompt is None and self.system_prompt is None:
            return None
        return Context(template=self.prompt, system_prompt=self.system_prompt)


class Benchmark(Settings):
    """A task of lm-eval."""

    task: str
    """Name of a task or group, of lm-eval or from `task_folder`."""
    name: Name | None = None
    """Name in metrics, `eval/<name>/<metric>`; by default the task's, with `_5shot` if `shots` is 5."""
    shots: int | None = Field(None, ge=0)
    """Solved examples before each question; by default the task's number."""
    limit: int | None = Field(None, ge=1)
    """Questions of each task, from the first, or all if null."""
    chat: bool = False
    """Format questions with the model's chat template, examples as earlier turns."""

    @property
    def label(self) -> str:
        """Name in metrics."""
        shots = "" if self.shots is None else f"_{self.shots}shot"
        return self.name or re.sub(r"[^A-Za-z0-9_.-]", "_", self.task) + shots


def _with_task(value: object) -> object:
    return {"task": value} if isinstance(value, str) else value


NamedBenchmark = Annotated[Benchmark, BeforeValidator(_with_task, json_schema_input_type=Benchmark | str)]
"""A benchmark, or the name of its task."""


class QuestionSets(Questions):
    """Unnamed questions, under `data`, and named sets."""

    sets: Frozen[str, QuestionSet] = Field(default_factory=dict)
    """Sets by name, each with data, reward, prompt and sampling; metrics are `eval/<name>/<measure>`."""
    benchmarks: OneOrMore[NamedBenchmark] = ()
    """Tasks of lm-eval, such as `[{task: mmlu, shots: 5, limit: 500}, gsm8k]`; needs the extra `eval`."""
    benchmark_length: int = Field(4096, ge=2)
    """Maximum tokens of a benchmark's question with its answer, at most the model's positions; longer ones are cut from
    the left.
    """
    task_folder: str | None = None
    """A folder with more tasks, as lm-eval's YAML files, or `demo:tasks`."""
    confirm_task_code: bool = False
    """Allow the code in `task_folder`, which lm-eval runs as this user: functions, templates, and metrics from the hub.
    """
    confirm_run_unsafe_code: bool = False
    """Allow benchmarks that run programs written by the model, without a sandbox, as this user."""

    on_error: Literal["warn", "stop"] = "warn"
    """warn: an answer whose reward fails counts as wrong, and in a run a set that fails in another way is skipped, both
    with a warning. stop: either is an error.
    """

    @model_validator(mode="before")
    @classmethod
    def sets_are_sampled_alike(cls, values: Any) -> Any:
        """Copy the common settings into each set that leaves them out; before validation, so that written settings are
        complete.
        """
        if not isinstance(values, dict):
            return values
        sets = values.get("sets") or {}
        if not isinstance(sets, dict):
            return values
        common = {key: values[key] for key in Questions.model_fields if key != "data" and key in values}
        merged = {
            name: {**common, **questions} if isinstance(questions, dict) else questions
            for name, questions in sets.items()
        }
        return {**values, "sets": merged}

    @model_validator(mode="after")
    def names_can_be_in_metrics(self) -> Self:
        for name in self.sets:
            if not re.fullmatch(NAME, name) or name in _MEASURES:
                raise ValueError(
                    f"sets: {name!r} cannot name a set in metrics (eval/<name>/<measure>); use letters, digits, `_`, "
                    f"`.` and `-`, and none of {', '.join(_MEASURES)}"
                )
        names = [*self.sets, *(benchmark.label for benchmark in self.benchmarks)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]!r} names two sets or benchmarks; give one of them another name")
        return self

    def check_answers(self, prefix: str, reward: Reward | None, environment: Environment | None) -> None:
        """Raise ValueError for a set whose answers have no reward, or that does not suit the environment.

        prefix: prefix of the settings' keys. reward: reward of sets without their own.
        """
        for name, questions in self.all_sets.items():
            section = f"{prefix}sets.{name}." if name else prefix
            own_reward = questions.reward if isinstance(questions, QuestionSet) else None
            if own_reward is None and reward is None:
                key = f"{section}reward" if name else "reward"
                raise ValueError(
                    f"{section[:-1] or key}: answers are scored by the reward; set {key}, such as {key}=numeric"
                )
            if environment is None:
                if own_reward is not None and is_paid_by_environment(own_reward):
                    raise ValueError(f"{section}reward: there is no environment that gives it; name another type")
                continue
            if questions.stop:
                raise ValueError(
                    f"{section}stop={list(questions.stop)}: an environment answers whole turns, which the model ends "
                    f"itself; leave {section}stop or environment out"
                )
            if isinstance(questions.data, SetSource) and questions.data.text_key is not None:
                raise ValueError(
                    f"{section}data.text_key={questions.data.text_key}: an environment needs conversations; name their "
                    "column as messages_key"
                )

    @property
    def all_sets(self) -> dict[str, Questions]:
        """Sets by name; the questions under `data` are named ''."""
        unnamed: dict[str, Questions] = {"": self} if self.data.given else {}
        return unnamed | dict(self.sets)


class Evaluation(QuestionSets):
    """Evaluation in a run."""

    every: int | None = Field(None, ge=1)
    """Optimizer steps between evaluations; by default only before the first and after the last step."""
    teachers: bool = False
    """Also ask each teacher once, before the first step, with its own tokenizer and chat template."""
    batch_size: int = Field(64, ge=1)
    """Off-policy: sequences that a rank of the student samples at a time. On-policy, `rollout.batch_size` is used."""
    teacher_batch_size: int = Field(64, ge=1)
    """Sequences that a rank of a teacher samples at a time."""
    num_samples_shown: int = Field(8, ge=0)
    """Questions of each set whose answers, by student and teachers, are in samples.jsonl and in the report."""


class QuestionSource(ValidationSource):
    """Source of questions, and their columns."""

    text_key: str = "text"
    """The column with a question as a text to continue."""
    messages_key: str | None = None
    """The column with a question as a conversation; `text_key` is then unused."""
    prompt_key: PromptColumns = ()
    """Columns with a question as a user's message; `text_key` is then unused."""
    tools_key: str | None = None
    """The column with the tools that a conversation may call; with `messages_key`."""


class EvaluationConfig(ModelSource, QuestionSets):
    """Evaluation of an existing model: all settings of `nemo-opd evaluate`."""

    model: str
    """A Hugging Face folder, a folder with an adapter (PEFT), a hub name (`NAME@REVISION`), or
    `demo:arithmetic_student`.
    """
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the model with rollout.type=hf. auto: bfloat16 on GPU, float32 on CPU."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device of the model with rollout.type=hf."""
    parallelism: Parallelism = Field(default_factory=Parallelism)
    """Layout of the model over the ranks of `cluster`, with rollout.type=hf."""
    cluster: EvaluationCluster = Field(default_factory=EvaluationCluster)
    """Processes of the model with rollout.type=hf."""
    data: QuestionSource = Field(default_factory=QuestionSource)
    """Questions, scored by `reward`."""
    reward: Reward | None = None
    """Reward of an answer; needed if a set has none."""
    environment: Environment | None = None
    """Environment that answers between the model's turns. By default the model has one turn."""
    rollout: Rollouts = Field(default_factory=HFRollout)
    """The engine. Sampling is set next to it: n, temperature, top_p, top_k, max_new_tokens."""
    max_new_tokens: int = Field(DEFAULT_NEW_TOKENS, ge=1)
    """Maximum tokens in one turn of the model."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Maximum tokens of a question, or null for no limit. Longer ones are skipped with a warning."""
    seed: int = Field(0, ge=0)
    """Seed of sampling."""
    output_dir: FilePath | None = None
    """Folder of results.json and samples.jsonl; by default `outputs/evaluation/<time>`."""

    @field_serializer("rollout")
    def written_as_it_is_read(self, rollout: Rollouts) -> dict[str, Any]:
        return rollout.model_dump(mode="json", exclude=set(RolloutBase.model_fields))

    @model_validator(mode="after")
    def rollout_only_names_the_engine(self) -> Self:
        for key in (*RolloutBase.model_fields, "sleep"):
            if key in self.rollout.model_fields_set:
                way_out = f"write {key}=…" if key in type(self).model_fields else "leave it out"
                raise ValueError(f"rollout.{key} is for training, and has no effect on an evaluation; {way_out}")
        for key, default in (("parallelism", Parallelism()), ("cluster", EvaluationCluster())):
            if not isinstance(self.rollout, HFRollout) and getattr(self, key) != default:
                raise ValueError(
                    f"{key}: with rollout.type={self.rollout.type} a server with its own ranks answers; leave {key} "
                    "out, or write rollout=hf"
                )
        return self

    @model_validator(mode="after")
    def questions_and_reward_suit_the_environment(self) -> Self:
        is_chat = self.data.messages_key is not None or self.data.prompt_key
        if not is_chat and (self.environment is not None or self.data.tools_key is not None):
            key = "environment" if self.environment is not None else "data.tools_key"
            raise ValueError(f"{key} is for conversations; name their column as data.messages_key")
        if self.environment is None and self.reward is not None and is_paid_by_environment(self.reward):
            raise ValueError("reward.type=environment: there is no environment; set environment, or another reward")
        self.check_answers("", self.reward, self.environment)
        return self
