"""Checks of a run's paths before the slow import of PyTorch, and the columns of its data."""

import os
from collections.abc import Iterator
from pathlib import Path

from nemo_opd.checkpoint.run_directory import progress_to_resume, resolve_output_dir
from nemo_opd.config.load import from_dict
from nemo_opd.config.model import Model
from nemo_opd.config.reward import calls_users_code
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import OwnIdsTeacher, UnresolvedTeacher
from nemo_opd.data.files import first_columns, require_suitable
from nemo_opd.data.layout import Layout, PromptLayout, RoutedLayout
from nemo_opd.data.layout import layout_of as data_layout
from nemo_opd.errors import ConfigError, DataError, ProjectionError
from nemo_opd.evaluation.inputs import ResolvedSet, check_benchmarks, check_sets, resolved_sets, with_columns
from nemo_opd.extras import require_extras, require_installed
from nemo_opd.models.folder import check_folder, check_tokenizer, read_template, require_hub
from nemo_opd.rewards import build_reward
from nemo_opd.teacher_cache.shard import CacheManifest, read_manifest


def check_inputs(config: RunConfig, *, on_policy: bool) -> None:
    """Check that files and programs in the settings exist and are valid. Raises an OPDError otherwise."""
    require_kind(config, on_policy=on_policy)
    if not any(isinstance(teacher, UnresolvedTeacher) for teacher in config.active_teachers):
        # Only preflight knows the types of these teachers. It also hashes the checkpoint's files.
        progress_to_resume(config, resolve_output_dir(config.run), hashed=False)
    _check_model(config.student, "student")
    for i, teacher in enumerate(config.active_teachers):
        if teacher.cache is not None:
            require_cache(teacher.cache, f"teachers.{i}.cache")
        elif not teacher.is_computed:
            _check_tokenizer(teacher, f"teachers.{i}")
        else:
            _check_model(teacher, f"teachers.{i}")
        if isinstance(teacher, OwnIdsTeacher) and teacher.projection != "auto":
            _check_projection(teacher.projection, f"teachers.{i}.projection")
    require_extras(config.logging, config.reward)
    if not config.run.dry_run:  # a dry run may plan for another machine
        require_installed(config.rollout)
        if (push := config.run.push_to_hub) is not None:
            require_hub(f"run.push_to_hub.repo={push.repo}")
    _check_data(config)


def resolve_columns(config: RunConfig) -> RunConfig:
    """Return the settings with data.messages_key=messages if the texts have this column, and no column `text`.

    Nothing changes if a setting names the column. Raises DataError if the texts cannot be read.
    """
    data = config.data
    if data.messages_key is not None or "text_key" in data.model_fields_set:
        return config
    columns = first_columns(data.train, key="data.train")
    if data.text_key in columns or "messages" not in columns:
        return config
    settings = config.model_dump(mode="json")
    settings["data"]["messages_key"] = "messages"
    return from_dict(settings)


def require_kind(config: RunConfig, *, on_policy: bool) -> None:
    """Raise ConfigError for settings of the other kind of run."""
    if on_policy and config.rollout is None:
        raise ConfigError("rollout: required, but not given; add rollout=hf or rollout=server, or use nemo-opd distil")
    if not on_policy and config.rollout is not None:
        raise ConfigError(
            f"rollout.type={config.rollout.type}: this run learns from the texts of its data and samples none; remove "
            "rollout, or use nemo-opd distil-on-policy"
        )


def _check_model(settings: Model, key: str) -> None:
    check_folder(settings.reference, key=f"{key}.model")
    _check_tokenizer(settings, key)


def _check_tokenizer(settings: Model, key: str) -> None:
    if settings.tokenizer is not None:
        check_tokenizer(settings.tokenizer, key=f"{key}.tokenizer")
    if settings.chat_template is not None:
        read_template(settings.chat_template, key=f"{key}.chat_template")


def require_cache(folder: str, key: str) -> CacheManifest:
    """Read a cache's manifest. Raises DataError, naming `key`, if it cannot be read."""
    try:
        return read_manifest(folder)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def _check_projection(path: str, key: str) -> None:
    """Raise ProjectionError for an unreadable file. Preflight checks its contents against the tokenizers."""
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise ProjectionError(
            f"{key}: cannot read the projection {path}: {reason}; correct the path, or write projection: auto"
        ) from error


def _check_data(config: RunConfig) -> None:
    require_suitable(config.data.train, layout_of(config), key="data.train")
    if config.data.validation.given:
        layout = layout_of(config, is_validation=True)
        require_suitable(config.data.validation, layout, key="data.validation")
    if config.reward is not None and not calls_users_code(config.reward):
        build_reward(config.reward).close()
    check_sets(sets_of(config))
    check_benchmarks(config.evaluation, "evaluation.")


def layout_of(config: RunConfig, *, is_validation: bool = False) -> Layout:
    """Return the columns of documents, or of prompts for a run that samples, including teacher context columns.

    is_validation: also include the domain column.
    """
    layout: Layout = data_layout(config.data)
    reward = config.reward if config.rollout is not None else None
    if config.rollout is not None:
        layout = PromptLayout(layout, reward.answer_column if reward else None, config.data.response_key)
    if config.routing is not None:
        layout = RoutedLayout(layout, config.routing.key, config.active_names)
    fields = [] if reward is None else [(name, f"reward.{setting}") for name, setting in reward.named_columns.items()]
    domain_key = config.data.domain_key if is_validation else None
    return with_columns(layout, [*fields, *_context_fields(config)], reward, domain_key)


def domain_column(config: RunConfig) -> str | None:
    """Return our name of the domain column of validation texts, or None without one."""
    key = config.data.domain_key
    return None if key is None else layout_of(config, is_validation=True).columns[key]


def sets_of(config: RunConfig) -> Iterator[ResolvedSet]:
    """Yield the resolved question sets of a run."""
    if config.evaluation is not None:
        yield from resolved_sets(config.evaluation, config.data, config.reward, "evaluation.")


def has_contrast(config: RunConfig) -> bool:
    """Return whether a teacher also reads another record's context."""
    contexts = (teacher.context for teacher in config.active_teachers)
    return any(context is not None and context.contrast for context in contexts)


def _context_fields(config: RunConfig) -> list[tuple[str, str]]:
    """Return the columns that active teachers' contexts read, paired with the settings that name them."""
    return [
        (name, f"teachers.{i}.context.{teacher.context.named_in(name)}")
        for i, teacher in enumerate(config.active_teachers)
        if teacher.context is not None
        for name in teacher.context.fields
    ]
