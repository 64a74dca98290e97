"""Benchmarks of a run: their tasks, and the models that are asked."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import GenerationConfig

from nemo_opd.config.model import Student
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.errors import ConfigError
from nemo_opd.evaluation.inputs import is_left_out
from nemo_opd.models.load import load_config
from nemo_opd.rollout.hf import end_ids
from nemo_opd.training.model_info import ModelInfo

if TYPE_CHECKING:
    from nemo_opd.evaluation.benchmarks import LoadedBenchmark
    from nemo_opd.evaluation.language_model import TextModel

_log = logging.getLogger(__name__)
_LONGEST = 4096
"""Tokens of a request where the model could read more and the run's own sequences are shorter."""


@dataclass(frozen=True, slots=True)
class AskedModel:
    """A model as benchmarks ask it."""

    text: TextModel
    end_ids: frozenset[int]
    """Tokens that end an answer."""


@dataclass(frozen=True, slots=True)
class Benchmarks:
    """Benchmarks of an evaluation, and the models that are asked."""

    loaded: tuple[LoadedBenchmark, ...]
    student: AskedModel
    teachers: tuple[AskedModel, ...]
    """Active teachers, if they are asked."""


def load_run_benchmarks(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> Benchmarks | None:
    """Load the benchmarks; None without any.

    Raises what `load_benchmarks` raises, and ConfigError for a chat benchmark without a chat template.
    """
    evaluation = config.evaluation
    if evaluation is None or not evaluation.benchmarks:
        return None
    if is_left_out(evaluation):
        _log.warning(
            "the demo's benchmark is left out, since lm-eval is not installed (`pip install 'nemo-opd[eval]'`)"
        )
        return None
    from nemo_opd.evaluation.benchmarks import load_benchmarks  # with a library that only some have

    asked = zip(config.active_teachers, teachers, strict=True) if evaluation.teachers else ()
    return Benchmarks(
        load_benchmarks(evaluation, "evaluation."),
        _asked(config, config.student, student, "student"),
        tuple(_asked(config, settings, info, f"teachers.{i}") for i, (settings, info) in enumerate(asked)),
    )


def _asked(config: RunConfig, settings: Student | Teacher, info: ModelInfo, key: str) -> AskedModel:
    from nemo_opd.evaluation.language_model import TextModel

    assert config.evaluation is not None
    chats = [benchmark.task for benchmark in config.evaluation.benchmarks if benchmark.chat]
    if chats and info.tokenizer.chat_template is None:
        raise ConfigError(
            f"{key}: the tokenizer has no chat template, and the benchmark {chats[0]} has chat=true; write chat: "
            f"false, or name one as {key}.chat_template"
        )
    longest = max(_LONGEST, config.train.max_length)
    # The last token of a request is predicted only, but read all the same.
    limit = longest if info.positions is None else min(longest, info.positions - 1)
    model = load_config(settings.reference, key=f"{key}.model")
    return AskedModel(
        TextModel(info.tokenizer, limit, settings.chat_template_kwargs, config.run.seed),
        end_ids(info.tokenizer, GenerationConfig.from_model_config(model)),
    )
