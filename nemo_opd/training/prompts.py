"""Prompts of an on-policy run, and samples made from rollouts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from datasets import Dataset

from nemo_opd.config.data import Source
from nemo_opd.config.on_policy import longest_prompt
from nemo_opd.config.run import RunConfig
from nemo_opd.data.collate import collate
from nemo_opd.data.contrast import with_others
from nemo_opd.data.documents import TEACHER
from nemo_opd.data.domains import Domains, domains_of, in_domains
from nemo_opd.data.in_context import PrivilegedPrompt
from nemo_opd.data.order import BatchOrder, State
from nemo_opd.data.prompts import read_prompts
from nemo_opd.data.record import Prompt, Rollout
from nemo_opd.data.rollouts import RolloutSampleMaker
from nemo_opd.data.samples import Sample
from nemo_opd.data.sources import load_documents
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.evaluation.inputs import build_set_reward
from nemo_opd.progress import tracked, working
from nemo_opd.rewards.build import build_reward, check_answers
from nemo_opd.rollout.environments import build_environment
from nemo_opd.rollout.prompts import dataset_rollout, drop_long
from nemo_opd.rollout.renderer import Renderer
from nemo_opd.training.callbacks import import_callbacks
from nemo_opd.training.inputs import domain_column, has_contrast, layout_of, sets_of
from nemo_opd.training.model_info import ModelInfo
from nemo_opd.training.sample_makers import build_rollout_sample_maker
from nemo_opd.training.sampled_models import SampledModel, sampled_model
from nemo_opd.types import Batch


@dataclass(frozen=True)
class _PromptSet:
    """Prompts that leave room for a response."""

    documents: Dataset
    names: Mapping[str, str]
    """Column name in the user's data → name used here."""
    rows: tuple[int, ...]
    """Rows of `documents` that leave room for a response."""
    num_dropped: int
    """Number of prompts that are too long."""

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Sequence[int]) -> list[Prompt]:
        return read_prompts(self.documents, [self.rows[i] for i in indices], self.names)

    def all(self) -> list[Prompt]:
        return self.read(range(len(self)))


@dataclass(frozen=True)
class Prompts:
    """Prompts for training and validation, and functions from rollouts to samples."""

    train: _PromptSet
    validation: _PromptSet | None
    """Prompts that all have a response in the dataset."""
    student: SampledModel
    sample_maker: RolloutSampleMaker
    teachers: tuple[str, ...]
    """Names of the active teachers if prompts are routed to them; empty without routing."""
    domains: Domains | None = None
    """Domains of the validation prompts."""
    noun: ClassVar[str] = "prompts"

    def order(self, config: RunConfig) -> BatchOrder:
        """Return the order in which batches take prompts."""
        assert config.rollout is not None
        per_batch = config.train.global_batch_size // config.rollout.n
        return BatchOrder(len(self.train), per_batch, config.run.seed, config.data.shuffle)

    def start(self, config: RunConfig) -> State:
        """Return the loader state before the first batch."""
        return self.order(config).start

    def steps(self, config: RunConfig) -> list[int]:
        """Return the optimizer steps of each of `train.epochs`, by default one."""
        return [self.order(config).steps_per_epoch] * (config.train.epochs or 1)

    def from_dataset(self, prompt: Prompt) -> Rollout:
        """Return the dataset's response as a rollout. Raises DataError if it has none."""
        return dataset_rollout(prompt, self.student.renderer, self.student.max_length)

    def make_sample(self, rollout: Rollout) -> Sample:
        """Return a rollout's sample. Raises AlignmentError if a teacher's chat template refuses the conversation."""
        sample = self.sample_maker(rollout)
        return replace(sample, route=self._routes[rollout.prompt.index]) if self.teachers else sample

    @cached_property
    def _routes(self) -> list[int]:
        """Index of the teacher named in each row of the training data."""
        return [self.teachers.index(name) for name in self.train.documents[TEACHER]]

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield batches of all validation prompts with their responses, in order."""
        assert self.validation is not None
        prompts = self.validation.all()
        for start in range(0, len(prompts), batch_size):
            part = prompts[start : start + batch_size]
            batch = collate([self.sample_maker(self.from_dataset(prompt)) for prompt in part])
            yield in_domains(batch, self.domains, start)


def check_users_code(config: RunConfig) -> None:
    """Raise ConfigError if a callback, reward or environment of the user cannot be imported or is not one."""
    import_callbacks(config.run.callbacks)
    if config.reward is not None:
        build_reward(config.reward).close()
    for question_set in sets_of(config):
        build_set_reward(question_set).close()
    if config.environment is not None:
        build_environment(config.environment)


def load_prompts(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> Prompts:
    """Load all prompts.

    Raises DataError if prompts cannot be read or do not fit the reward, or if all are too long.
    """
    assert config.rollout is not None
    is_chat = config.data.messages_key is not None
    sampled = sampled_model(config.student, student, "student", config.train.max_length, is_chat=is_chat)
    renderer = sampled.renderer
    train = _prompt_set(config, renderer, config.data.train, "data.train")
    if config.rollout.on_policy_share < 1:
        _require_responses(train, renderer, "data.train")
    validation = domains = None
    if config.data.validation.given:
        validation = _prompt_set(config, renderer, config.data.validation, "data.validation", is_validation=True)
        _require_responses(validation, renderer, "data.validation")
        domains = domains_of(validation.documents, domain_column(config), validation.rows)
    sample_maker = build_rollout_sample_maker(config, student, teachers)
    for key, prompts in (("data.train", train), ("data.validation", validation)):
        _require_room(sample_maker, prompts, key)
    return Prompts(
        train=train,
        validation=validation,
        student=sampled,
        sample_maker=sample_maker,
        teachers=config.active_names if config.routing is not None else (),
        domains=domains,
    )


def _prompt_set(
    config: RunConfig, renderer: Renderer, source: Source, key: str, *, is_validation: bool = False
) -> _PromptSet:
    """Load the prompts that leave room for a response. Raises DataError, with the row, if one cannot be used."""
    layout = layout_of(config, is_validation=is_validation)
    with working(f"reading {key}"):
        documents = load_documents(source, layout, key=key)
        if has_contrast(config):
            documents = with_others(documents, key)
        prompts = read_prompts(documents, range(len(documents)), layout.columns)
    if config.reward is not None:
        check_answers(config.reward, prompts, source=key)
    way_out = "raise rollout.max_prompt_length or train.max_length, or lower rollout.max_new_tokens"
    fitting = drop_long(prompts, renderer, longest_prompt(config), key=key, way_out=way_out)
    rows = tuple(prompt.index for prompt in fitting.prompts)
    return _PromptSet(documents, layout.columns, rows, fitting.num_dropped)


def _require_responses(prompts: _PromptSet, renderer: Renderer, key: str) -> None:
    """Raise DataError, with the row, for the first prompt without a response."""
    for prompt in prompts.all():
        if prompt.response is None:
            raise DataError(
                f"{key}: row {prompt.index} (counted from 0 over all files) has no response to learn from; set "
                "data.response_key to its column (texts), end the conversation with the assistant's message, or leave "
                "the row out"
            )


def _require_room(maker: RolloutSampleMaker, prompts: _PromptSet | None, key: str) -> None:
    """Raise DataError, with the row, if a teacher's context cannot be built or leaves no room for a response."""
    readers = [teacher for teacher in maker.teachers if isinstance(teacher, PrivilegedPrompt)]
    if prompts is None or not readers:
        return
    for prompt in tracked(prompts.all(), f"tokenizing the contexts of {key}", "prompts"):
        try:
            for reader in readers:
                for content in reader.context.contents(prompt.content, prompt.fields):
                    reader.prompt_ids(content, prompt.tools)
        except (AlignmentError, DataError) as error:
            raise DataError(f"{key}: row {prompt.index} (counted from 0 over all files): {error}") from error
