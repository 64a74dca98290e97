"""Prompts, evaluation questions and benchmarks of a run, and the models that answer them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from datasets import Dataset
from transformers import GenerationConfig

from nemo_opd.config.data import Source
from nemo_opd.config.model import Student
from nemo_opd.config.run import RunConfig
from nemo_opd.config.sampling_checks import longest_prompt
from nemo_opd.config.teacher import CrossTokenizerTeacher, Teacher
from nemo_opd.data.collate import collate
from nemo_opd.data.columns import Layout, domain_column, has_contrast, run_layout
from nemo_opd.data.context import PrivilegedPrompt
from nemo_opd.data.document_sources import load_documents, with_others
from nemo_opd.data.loader import Domains, domains_of, in_domains
from nemo_opd.data.order import BatchOrder, State
from nemo_opd.data.rollouts import RolloutSampleMaker, read_prompts
from nemo_opd.data.row_types import TEACHER, Prompt, Rollout, texts_hash
from nemo_opd.data.samples import Sample
from nemo_opd.errors import AlignmentError, ConfigError, DataError
from nemo_opd.evaluation.benchmark_tasks import LoadedBenchmark, figure_names, load_benchmarks
from nemo_opd.evaluation.likelihoods import longest_request
from nemo_opd.evaluation.question_sets import ResolvedSet, build_set_reward, is_left_out
from nemo_opd.evaluation.questions import read_questions
from nemo_opd.models.load import load_config
from nemo_opd.preflight.corpus import build_rollout_sample_maker
from nemo_opd.preflight.inputs import sets_of
from nemo_opd.preflight.model_info import ModelInfo
from nemo_opd.progress import tracked, working
from nemo_opd.rewards.configured import build_reward, check_answers
from nemo_opd.rollout.collect import dataset_rollout, drop_long
from nemo_opd.rollout.conversation import build_renderer
from nemo_opd.rollout.environment import build_environment
from nemo_opd.rollout.renderer import Renderer
from nemo_opd.rollout.transformers_engine import end_ids
from nemo_opd.types import Batch
from nemo_opd.users_code import import_callbacks

if TYPE_CHECKING:
    from nemo_opd.evaluation.benchmarks import TextModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampledModel:
    """Renderer and limits of a model that generates."""

    renderer: Renderer
    end_ids: frozenset[int]
    """Tokens that end a response."""
    max_length: int
    """Most tokens of prompt and response together."""


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

    @property
    def validation_hash(self) -> str | None:
        """Hash of the validation prompts with their responses; None without any."""
        return None if self.validation is None else texts_hash(self.validation.all())

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield batches of all validation prompts with their responses, in order."""
        assert self.validation is not None
        prompts = self.validation.all()
        for start in range(0, len(prompts), batch_size):
            part = prompts[start : start + batch_size]
            batch = collate([self.sample_maker(self.from_dataset(prompt)) for prompt in part])
            yield in_domains(batch, self.domains, start)


def load_prompts(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> Prompts:
    """Load all prompts.

    Raises DataError if prompts cannot be read or do not fit the reward, or if all are too long.
    """
    assert config.rollout is not None
    is_chat = config.data.is_chat
    sampled = _sampled_model(config.student, student, "student", config.train.max_length, is_chat=is_chat)
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


@dataclass(frozen=True)
class _PromptSet:
    """Prompts that leave room for a response."""

    documents: Dataset
    layout: Layout
    rows: tuple[int, ...]
    """Rows of `documents` that leave room for a response."""
    num_dropped: int
    """Number of prompts that are too long."""

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Sequence[int]) -> list[Prompt]:
        return read_prompts(self.documents, [self.rows[i] for i in indices], self.layout)

    def all(self) -> list[Prompt]:
        return self.read(range(len(self)))


def _prompt_set(
    config: RunConfig, renderer: Renderer, source: Source, key: str, *, is_validation: bool = False
) -> _PromptSet:
    """Load the prompts that leave room for a response. Raises DataError, with the row, if one cannot be used."""
    layout = run_layout(config, is_validation=is_validation)
    with working(f"reading {key}"):
        documents = load_documents(source, layout, key=key)
        if has_contrast(config):
            documents = with_others(documents, key)
        prompts = read_prompts(documents, range(len(documents)), layout)
    if config.reward is not None:
        check_answers(config.reward, prompts, source=key)
    way_out = "raise rollout.max_prompt_length or train.max_length, or lower rollout.max_new_tokens"
    fitting = drop_long(prompts, renderer, longest_prompt(config), key=key, way_out=way_out)
    rows = tuple(prompt.index for prompt in fitting)
    return _PromptSet(documents, layout, rows, len(prompts) - len(fitting))


def _require_responses(prompts: _PromptSet, renderer: Renderer, key: str) -> None:
    """Raise DataError, with the row, for the first prompt without a response."""
    for prompt in prompts.all():
        if prompt.response is None:
            raise DataError(
                f"{key}: row {prompt.index} (counted from 0 over all files) has no response to learn from; name its "
                "column as data.response_key (texts) or data.completion_key (with data.prompt_key), end the "
                "conversation with the assistant's message, or leave the row out"
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


@dataclass(frozen=True, slots=True)
class LoadedSet:
    """Question set with the models that answer it."""

    resolved: ResolvedSet
    prompts: tuple[Prompt, ...]
    num_dropped: int
    """Number of questions that are too long."""
    student: SampledModel
    teachers: tuple[SampledModel, ...]
    """Active teachers; empty if only the student is asked."""


def load_sets(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> tuple[LoadedSet, ...]:
    """Load all question sets.

    Raises DataError if questions cannot be read or do not fit the reward, if all are too long, or, with the row, if one
    leaves a teacher no room for an answer. Raises AlignmentError if questions are conversations and a model has no chat
    template.
    """
    return tuple(_load_set(config, resolved, student, teachers) for resolved in sets_of(config))


def _load_set(config: RunConfig, resolved: ResolvedSet, student: ModelInfo, teachers: Sequence[ModelInfo]) -> LoadedSet:
    limit = min(config.train.max_length, student.positions or config.train.max_length)
    model = _sampled_model(config.student, student, "student", limit, is_chat=resolved.is_chat)
    prompts = read_questions(resolved)
    longest = longest_prompt(config) if config.rollout is not None else limit - config.new_tokens(resolved.name)
    keys = "rollout.max_prompt_length or train.max_length, or lower rollout.max_new_tokens"
    if config.rollout is None:
        keys = f"train.max_length, or lower {resolved.prefix}max_new_tokens"
    fitting = drop_long(prompts, model.renderer, longest, key=resolved.key, way_out=f"raise {keys}")
    assert config.evaluation is not None
    answering: tuple[SampledModel, ...] = ()
    if config.evaluation.teachers:
        answering = tuple(
            _evaluated_teacher(config, i, settings, info, resolved, fitting)
            for i, (settings, info) in enumerate(zip(config.active_teachers, teachers, strict=True))
        )
    return LoadedSet(resolved, fitting, len(prompts) - len(fitting), model, answering)


def _evaluated_teacher(
    config: RunConfig, i: int, settings: Teacher, info: ModelInfo, resolved: ResolvedSet, questions: Sequence[Prompt]
) -> SampledModel:
    max_length = settings.max_length if isinstance(settings, CrossTokenizerTeacher) else None
    max_length = max_length or config.train.max_length
    try:
        limit = min(max_length, info.positions or max_length)
        model = _sampled_model(settings, info, f"teachers.{i}", limit, is_chat=resolved.is_chat)
        _require_answer_room(model, questions)
    except (AlignmentError, DataError) as error:
        raise type(error)(
            f"teachers.{i} ({settings.name}) cannot be asked the questions of {resolved.key}: {error}; or ask only the "
            "student, with evaluation.teachers=false"
        ) from error
    return model


def _require_answer_room(model: SampledModel, questions: Sequence[Prompt]) -> None:
    """Raise DataError, with the row, if a question leaves no room for an answer."""
    for question in questions:
        if (length := len(model.renderer.prompt_ids(question))) >= model.max_length:
            raise DataError(
                f"prompt {question.index} (row, counted from 0) has {length} of the teacher's tokens and leaves no "
                f"room for an answer in {model.max_length}; leave the row out, or raise train.max_length up to the "
                "model's limit"
            )


def _sampled_model(
    settings: Student | Teacher, info: ModelInfo, key: str, max_length: int, *, is_chat: bool
) -> SampledModel:
    """Return a model's renderer and limits. key: its section in the settings, such as `student` or `teachers.0`.

    Raises AlignmentError if prompts are conversations and the model has no chat template.
    """
    renderer = build_renderer(info.tokenizer, is_chat, settings.chat_template_kwargs, info.vocab_size, key=key)
    model = load_config(settings.reference, key=f"{key}.model")
    return SampledModel(renderer, end_ids(info.tokenizer, GenerationConfig.from_model_config(model)), max_length)


@dataclass(frozen=True, slots=True)
class Benchmarks:
    """Benchmarks of an evaluation and the models that answer them."""

    loaded: tuple[LoadedBenchmark, ...]
    student: _BenchmarkedModel
    teachers: tuple[_BenchmarkedModel, ...]
    """The active teachers, or none with evaluation.teachers=false."""


@dataclass(frozen=True, slots=True)
class _BenchmarkedModel:
    """A model that answers benchmarks."""

    text: TextModel
    end_ids: frozenset[int]
    """Tokens that end an answer."""


def load_tasks(config: RunConfig) -> tuple[LoadedBenchmark, ...]:
    """Load the tasks of all benchmarks; none if the demo runs without lm-eval.

    Raises the errors of `load_benchmarks`, and ConfigError if `train.keep_best` or `early_stopping` names a metric that
    its benchmark lacks.
    """
    evaluation = config.evaluation
    if evaluation is None or not evaluation.benchmarks:
        return ()
    if is_left_out(evaluation):
        _log.warning("skipping the demo's benchmark, since lm-eval is not installed (`pip install 'nemo-opd[eval]'`)")
        return ()
    loaded = load_benchmarks(evaluation, "evaluation.")
    for key, settings in (("keep_best", config.train.keep_best), ("early_stopping", config.train.early_stopping)):
        if settings is not None:
            _check_metric(settings.metric, f"train.{key}.metric", loaded)
    return loaded


def _check_metric(metric: str, key: str, loaded: Sequence[LoadedBenchmark]) -> None:
    """Raise ConfigError if the metric names a benchmark that lacks it."""
    for benchmark in loaded:
        prefix, figures = f"eval/{benchmark.settings.label}/", figure_names(benchmark)
        name = metric.removeprefix(prefix)
        if metric.startswith(prefix) and not any(name == figure or name.endswith(f".{figure}") for figure in figures):
            choices = ", ".join(prefix + figure for figure in sorted(figures))
            raise ConfigError(f"{key}={metric}: the benchmark has no such metric; choose from {choices}")


def plan_benchmarks(
    config: RunConfig, loaded: tuple[LoadedBenchmark, ...], student: ModelInfo, teachers: Sequence[ModelInfo]
) -> Benchmarks | None:
    """Return the benchmarks with the models that answer them, or None without benchmarks.

    Raises ConfigError if a benchmark uses chat and a model has no chat template.
    """
    if not loaded:
        return None
    assert config.evaluation is not None
    pairs = zip(config.active_teachers, teachers, strict=True) if config.evaluation.teachers else ()
    return Benchmarks(
        loaded,
        _benchmarked(config, config.student, student, "student"),
        tuple(_benchmarked(config, settings, info, f"teachers.{i}") for i, (settings, info) in enumerate(pairs)),
    )


def _benchmarked(config: RunConfig, settings: Student | Teacher, info: ModelInfo, key: str) -> _BenchmarkedModel:
    from nemo_opd.evaluation.benchmarks import TextModel

    assert config.evaluation is not None
    chats = [benchmark.task for benchmark in config.evaluation.benchmarks if benchmark.chat]
    if chats and info.tokenizer.chat_template is None:
        raise ConfigError(
            f"{key}: the tokenizer has no chat template, but the benchmark {chats[0]} has chat=true; set chat: false, "
            f"or name a template in {key}.chat_template"
        )
    model = load_config(settings.reference, key=f"{key}.model")
    longest = longest_request(config.evaluation, info.positions)
    return _BenchmarkedModel(
        TextModel(info.tokenizer, longest, settings.chat_template_kwargs, config.run.seed),
        end_ids(info.tokenizer, GenerationConfig.from_model_config(model)),
    )


def longest_question(benchmarks: Benchmarks | None, teacher: int | None = None) -> int:
    """Return the token limit of a question with its answer for the student or a teacher; 0 if it answers none."""
    if benchmarks is None:
        return 0
    models = (benchmarks.student,) if teacher is None else benchmarks.teachers[teacher : teacher + 1]
    return max((model.text.max_length for model in models), default=0)


def check_users_code(config: RunConfig) -> None:
    """Raise ConfigError if a callback, reward or environment of the user cannot be imported or is not one."""
    import_callbacks(config.run.callbacks)
    if config.reward is not None:
        build_reward(config.reward).close()
    for question_set in sets_of(config):
        build_set_reward(question_set).close()
    if config.environment is not None:
        build_environment(config.environment)
