"""Checks of a run's paths before the slow import of PyTorch."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from nemo_opd.checkpoint.run_directory import progress_to_resume, resolve_output_dir
from nemo_opd.config.composition import to_yaml
from nemo_opd.config.data import Source
from nemo_opd.config.evaluation import QuestionSource
from nemo_opd.config.model import Model
from nemo_opd.config.reward import calls_users_code
from nemo_opd.config.run import RunConfig
from nemo_opd.config.short_form import long_form
from nemo_opd.config.teacher import OwnIdsTeacher, UnresolvedTeacher
from nemo_opd.data.column_checks import Reading, described, prompt_readings, readings, restricted_to
from nemo_opd.data.columns import run_layout
from nemo_opd.data.source_files import first_schema, require_suitable
from nemo_opd.errors import ConfigError, DataError, ProjectionError, run_all
from nemo_opd.evaluation.question_sets import ResolvedSet, check_benchmarks, check_sets, resolved_sets
from nemo_opd.extras import require_extras, require_installed
from nemo_opd.files import load_yaml
from nemo_opd.logging.provenance import read_provenance
from nemo_opd.logging.records import differing_setting, read_config, value_at
from nemo_opd.logging.scores import VALIDATION_LOG
from nemo_opd.logging.trackers import check_trackers
from nemo_opd.models.folder import check_folder, check_tokenizer, read_template, require_hub
from nemo_opd.rewards import build_reward
from nemo_opd.teacher_cache.shard import require_cache


def check_inputs(config: RunConfig, *, on_policy: bool) -> None:
    """Check that files, programs and keys in the settings exist and are valid.

    Raises an OPDError otherwise, with a line for each problem.
    """
    require_kind(config, on_policy=on_policy)
    run_all(_checks(config))
    check_benchmarks(config.evaluation, "evaluation.")  # a slow import


def _checks(config: RunConfig) -> Iterator[Callable[[], object]]:
    """Yield checks that are independent of one another."""
    if not any(isinstance(teacher, UnresolvedTeacher) for teacher in config.active_teachers):
        # Only preflight knows the types of these teachers. It also hashes the checkpoint's files.
        yield lambda: progress_to_resume(config, resolve_output_dir(config.run), hashed=False)
    yield partial(_check_model, config.student, "student")
    for i, teacher in enumerate(config.active_teachers):
        if teacher.cache is not None:
            yield partial(require_cache, teacher.cache, f"teachers.{i}.cache")
        elif not teacher.is_computed:
            yield partial(_check_tokenizer, teacher, f"teachers.{i}")
        else:
            yield partial(_check_model, teacher, f"teachers.{i}")
        if isinstance(teacher, OwnIdsTeacher) and teacher.projection != "auto":
            yield partial(_check_projection, teacher.projection, f"teachers.{i}.projection")
    yield partial(_check_extras, config)
    if (push := config.run.push_to_hub) is not None:
        yield partial(require_hub, f"run.push_to_hub.repo={push.repo}")
    if not config.run.dry_run:  # a dry run may plan for a machine with other programs
        yield partial(require_installed, config.rollout)
    yield partial(_check_files, config)
    yield partial(_check_reward, config)
    yield lambda: check_sets(sets_of(config))
    if isinstance(config.run.baseline, Path):
        yield partial(_check_baseline, config, config.run.baseline)


def _check_extras(config: RunConfig) -> None:
    require_extras(config.logging, None)
    check_trackers(config.logging)


def _check_baseline(config: RunConfig, folder: Path) -> None:
    """Raise ConfigError for a folder that is not of a run with validation, without teachers and otherwise alike."""
    problem, settings, provenance = None, read_config(folder), read_provenance(folder)
    steps = None if provenance is None else provenance.total_steps
    if not (folder / VALIDATION_LOG).is_file():
        problem = f"not the directory of a run with validation (there is no {VALIDATION_LOG})"
    elif value_at(settings, "loss.kd_weight"):
        problem = "this run learned from teachers"
    elif steps is not None and config.train.max_steps not in (None, steps):
        problem = f"it took {steps:,} steps, and this run takes train.max_steps={config.train.max_steps:,}"
    elif config.rollout is None and (differing := differing_setting(settings, load_yaml(to_yaml(config)))) is not None:
        key, value, other = differing
        problem = f"{key} is {value} there and {other} here, so their results would not compare"
    if problem is not None:
        raise ConfigError(
            f"run.baseline={folder}: {problem}; name a finished run without teachers, otherwise like this"
            + (", or write true to train it first" if config.rollout is None else "")
        )


def with_documents_columns(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name the columns of documents in composed settings as the first training file has them, if no setting names them.

    Strings that stand for sections become sections. Names no column for texts, for the hub, which is not contacted
    here, and for files whose columns have other names. Raises DataError if there are several readings.
    """
    settings = long_form(settings)
    data = settings.get("data")
    if not isinstance(data, Mapping) or {"text_key", "messages_key", "prompt_key"} & data.keys():
        return settings
    source, schema = _first_columns(data.get("train"), "data.train")
    if schema is None:
        return settings
    written, ways = data.get("completion_key"), readings(schema)
    if written is not None:
        ways = [way for way in ways if way.get("completion_key") == written]
    elif data.get("response_key") is not None:  # the answers are those of a stored response
        ways = [way for way in ways if "completion_key" not in way]
    if settings.get("rollout"):  # rewards compare with these columns
        answers = {("completion_key", name) for name in _answer_columns(settings.get("reward"))}
        ways = [dict(pair for pair in way.items() if pair not in answers) for way in ways]
        ways = ways or prompt_readings(schema)
    return {**settings, "data": {**data, **_only_reading(ways, source)}}


def with_question_columns(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name the columns of questions as the first file has them, if no setting names them; `messages` by default.

    Sets have the same columns, unless their settings name others. Raises DataError if there are several readings.
    """
    if {"text_key", "messages_key", "prompt_key"} & data.keys():
        return data
    source, schema = _first_columns({kind: data.get(kind) for kind in Source.model_fields}, "data")
    ways: Sequence[Reading] = ()
    if schema is not None and "messages" not in schema.names:
        ways = restricted_to(readings(schema), QuestionSource.model_fields) or prompt_readings(schema)
    return {**data, **(_only_reading(ways, source) or {"messages_key": "messages"})}


def _first_columns(source: object, key: str) -> tuple[str, pa.Schema | None]:
    """Return the name and the columns of a source's first file; no columns if they are not known here."""
    try:
        return first_schema(Source.model_validate(source), key=key)
    except (ValidationError, DataError):  # reported with all other settings
        return key, None


def _only_reading(ways: Sequence[Reading], source: str) -> Reading:
    """Return the reading, or an empty one if there is none. Raises DataError for several."""
    if len(ways) > 1:
        raise DataError(
            f"{source}: its columns can be read in {len(ways)} ways; write {', or '.join(map(described, ways))}"
        )
    return ways[0] if ways else {}


def _answer_columns(reward: object) -> Iterator[str]:
    """Yield the names of the answers' columns in the settings of a reward, and of those that it combines."""
    if isinstance(reward, Mapping):
        yield str(reward.get("answer_key", "answer"))
    for part in reward.values() if isinstance(reward, Mapping) else reward if isinstance(reward, list) else ():
        yield from _answer_columns(part)


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


def _check_files(config: RunConfig) -> None:
    """Check the training files, and then the validation files, whose columns depend on them."""
    require_suitable(config.data.train, run_layout(config), key="data.train")
    if config.data.validation.given:
        require_suitable(config.data.validation, run_layout(config, is_validation=True), key="data.validation")


def _check_reward(config: RunConfig) -> None:
    require_extras(None, config.reward)
    if config.reward is not None and not calls_users_code(config.reward):
        build_reward(config.reward).close()


def sets_of(config: RunConfig) -> Iterator[ResolvedSet]:
    """Yield the resolved question sets of a run."""
    if config.evaluation is not None:
        yield from resolved_sets(config.evaluation, config.data, config.reward, "evaluation.")
