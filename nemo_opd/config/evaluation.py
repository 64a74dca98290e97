"""Evaluation on questions whose answers can be checked."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_serializer, field_validator, model_validator

from nemo_opd.config.base import Frozen, Settings
from nemo_opd.config.data import ValidationSource
from nemo_opd.config.environment import Environment
from nemo_opd.config.reward import EnvironmentReward, Reward
from nemo_opd.config.rollout import HFRollout, RolloutBase, Rollouts


class Questions(Settings):
    """Sampling and judging of answers."""

    data: ValidationSource = Field(default_factory=ValidationSource)
    """Questions, with the same columns as `data.train`; scored by `reward`."""
    n: int = Field(1, ge=1)
    """Sampled answers to each question."""
    k: tuple[int, ...] = (1,)
    """Values of k for pass@k and maj@k; none above n."""
    greedy: bool = True
    """Whether to sample the likeliest answer too, once."""
    temperature: float = Field(1.0, gt=0)
    """Logits are divided by it before a token is sampled."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability; 1: from all."""
    top_k: int | None = Field(None, ge=1)
    """Sample from this number of likeliest tokens; null: from all."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Most tokens in one turn of the student; by default `rollout.max_new_tokens`."""
    correct_reward: float = 1.0
    """An answer of this reward or more is correct, for pass@k, maj@k and greedy. mean@n is of rewards."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """Confidence level of the intervals."""

    @field_validator("k", mode="before")
    @classmethod
    def one_k_is_a_list_of_one(cls, value: object) -> object:
        return (value,) if isinstance(value, int) else value

    @model_validator(mode="after")
    def k_is_at_most_n(self) -> Self:
        if beyond := [k for k in self.k if not 1 <= k <= self.n]:
            raise ValueError(f"k={list(self.k)}: {beyond[0]} of n={self.n} answers cannot be taken; raise n")
        return self


class Evaluation(Questions):
    """Evaluation in a run."""

    every: int | None = Field(None, ge=1)
    """Optimizer steps; by default before the first and after the last alone."""
    teachers: bool = False
    """Ask each teacher too, once, before the first step: in its own tokenizer and chat template, and sampled as the
    student is, by transformers in its own workers. Takes as long as a large model takes to answer.
    """
    teacher_batch_size: int = Field(64, ge=1)
    """Sequences a rank of a teacher samples at a time, beside all of its weights: the estimate's phase `answers`."""
    num_samples_shown: int = Field(8, ge=0)
    """Questions whose answers, of whoever is asked, are in samples.jsonl and in the report."""


class QuestionSource(ValidationSource):
    """Source of questions, and their columns."""

    text_key: str = "text"
    """The column that holds a question as a text to be continued."""
    messages_key: str | None = None
    """The column that holds it as a conversation; `text_key` is then unused."""
    tools_key: str | None = None
    """Column of the tools that a conversation may call; with `messages_key`."""


class EvaluationConfig(Questions):
    """Evaluation of an existing model: all settings of `nemo-opd evaluate`."""

    model: str
    """A Hugging Face folder, hub name, or `demo:arithmetic_student`."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; by default that of the model."""
    chat_template: str | None = None
    """A file with the chat template (Jinja), when the tokenizer has none or another is wanted."""
    chat_template_kwargs: Frozen[str, bool | int | float | str | None] = Field(default_factory=dict)
    """Arguments of the template in addition to the conversation, such as `enable_thinking: false`."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the model with rollout.type=hf. auto: bfloat16 on GPU, float32 on CPU."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device of the model with rollout.type=hf."""
    data: QuestionSource = Field(default_factory=QuestionSource)
    """Questions; scored by `reward`."""
    reward: Reward
    """Reward of an answer."""
    environment: Environment | None = None
    """Environment that answers between the model's turns; None: it has one turn."""
    rollout: Rollouts = Field(default_factory=HFRollout)
    """The engine. How it samples is told beside it: n, temperature, top_p, top_k, max_new_tokens."""
    max_new_tokens: int = Field(256, ge=1)
    """Most tokens in one turn of the model."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Tokens. Longer questions are left out, counted and told; null: none is."""
    seed: int = Field(0, ge=0)
    """Seed of sampling."""
    output_dir: Path | None = None
    """Folder of results.json and samples.jsonl; by default `outputs/evaluation/<time>`."""

    @field_validator("output_dir", mode="before")
    @classmethod
    def output_dir_is_not_empty(cls, value: object) -> object:
        if value == "":  # an unset shell variable, which would put the files into the current directory
            raise ValueError("it is empty; name a directory, or leave the key out for outputs/evaluation/<time>")
        return value

    @field_serializer("rollout")
    def written_as_it_is_read(self, rollout: Rollouts) -> dict[str, Any]:
        return rollout.model_dump(mode="json", exclude=set(RolloutBase.model_fields))

    @model_validator(mode="after")
    def sampling_is_told_once(self) -> Self:
        told = [key for key in (*RolloutBase.model_fields, "sleep") if key in self.rollout.model_fields_set]
        if told:
            way_out = f"write {told[0]}=…" if told[0] in type(self).model_fields else "leave it out"
            raise ValueError(f"rollout.{told[0]} is for training, and has no effect on an evaluation; {way_out}")
        return self

    @model_validator(mode="after")
    def turns_need_conversations(self) -> Self:
        if self.data.messages_key is None and (self.environment is not None or self.data.tools_key is not None):
            key = "environment" if self.environment is not None else "data.tools_key"
            raise ValueError(f"{key} is for conversations; name their column as data.messages_key")
        if isinstance(self.reward, EnvironmentReward) and self.environment is None:
            raise ValueError("reward.type=environment: there is no environment; set environment, or another reward")
        return self
