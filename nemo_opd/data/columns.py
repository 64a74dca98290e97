"""Layouts: the columns that settings name, and their uses. `data.column_checks` checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nemo_opd.config.data import Data
from nemo_opd.config.reward import FunctionReward, Reward
from nemo_opd.config.run import RunConfig
from nemo_opd.data.row_types import (
    ANSWER,
    COMPLETION,
    DOMAIN,
    FIELD,
    MESSAGES,
    PROMPT,
    RESPONSE,
    TEACHER,
    TEXT,
    TOOLS,
)
from nemo_opd.errors import DataError

Use = Literal["text", "messages", "turn", "teacher", "domain", "prompt", "field", "answer", "response"]
"""Use of a column, which determines its types. turn: one side of a prompt and its completion, texts or messages.
prompt, field: a teacher's whole prompt, or a value in it.
"""


DATA_SETTINGS = {
    key: f"data.{key}" for key in ("text_key", "messages_key", "prompt_key", "completion_key", "tools_key")
}
"""Settings of a run that name the columns of documents, as they are typed, by their keys."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column that a setting names."""

    setting: str
    name: str
    """The user's name."""
    ours: str
    """Our name."""
    use: Use
    is_required: bool = False
    """Whether it may have no nulls."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns to read. Several settings may name one column."""

    named: tuple[Column, ...]
    settings: Mapping[str, str]
    """Settings that may name the columns of documents, as they are typed, by their keys in `data`."""
    teachers: tuple[str, ...] = ()
    """Teachers that a column may name, if one is for the routed aggregation."""
    whole_rows: bool = False
    """Whether to read all other columns, too."""

    @property
    def columns(self) -> dict[str, str]:
        """The user's name of a column → ours, by the first setting that names it."""
        columns: dict[str, str] = {}
        for column in self.named:
            columns.setdefault(column.name, column.ours)
        return columns

    def ours(self, use: Use) -> str:
        """Return our name for the column with this use, the first use's if it is shared; the use if none is named."""
        return next((column.ours for column in self.named if column.use == use), use)

    def with_prompts(
        self, answer_key: str | None = None, response_key: str | None = None, *, reward: str = "reward"
    ) -> Layout:
        """Add a verifiable reward's answers and the responses, if their columns are named.

        reward: section of the settings that contains `answer_key`. Answers may be the completions or the responses.
        Raises DataError if it is another column of the documents.
        """
        layout = self
        uses: tuple[tuple[str, str | None, Use], ...] = (
            (f"{reward}.answer_key", answer_key, "answer"),
            ("data.response_key", response_key, "response"),
        )
        for setting, name, use in uses:
            if name is None:
                continue
            ours = layout.columns.get(name, use)
            if ours not in (ANSWER, RESPONSE, COMPLETION):
                raise DataError(f"{setting}={name}: that column already holds the prompts' {ours}; name another")
            layout = replace(layout, named=(*layout.named, Column(setting, name, ours, use)))
        return layout

    def with_routes(self, key: str, teachers: tuple[str, ...]) -> Layout:
        """Add a column that names the teacher of each document."""
        column = Column("aggregation.key", key, TEACHER, "teacher", is_required=True)
        return replace(self, named=(*self.named, column), teachers=teachers)

    def with_fields(self, named: Sequence[tuple[str, str]]) -> Layout:
        """Add the columns that contexts and rewards read. named: pairs of a column and a setting that names it."""
        columns = self.columns
        fields = (
            Column(
                setting,
                name,
                columns.get(name, FIELD + name),
                "prompt" if setting.endswith(".key") else "field",
                is_required=True,
            )
            for name, setting in named
        )
        return replace(self, named=(*self.named, *fields))

    def with_domains(self, key: str) -> Layout:
        """Add a column with the documents' domains."""
        return replace(self, named=(*self.named, Column("data.domain_key", key, DOMAIN, "domain")))

    def for_reward(self, reward: Reward | None) -> Layout:
        """Read entire rows if the reward may read any column."""
        reads_rows = reward is not None and any(isinstance(part, FunctionReward) for part in reward.parts)
        return replace(self, whole_rows=reads_rows)


def text_layout(text_key: str, settings: Mapping[str, str] = DATA_SETTINGS) -> Layout:
    """Return the layout of documents that are strings. settings: as in `Layout`."""
    return Layout((Column(settings["text_key"], text_key, TEXT, "text", is_required=True),), settings)


def chat_layout(
    messages_key: str | None,
    tools_key: str | None,
    settings: Mapping[str, str] = DATA_SETTINGS,
    prompt_key: Sequence[str] = (),
    completion_key: str | None = None,
) -> Layout:
    """Return the layout of conversations: lists of messages, or prompts with completions, and optional lists of tools.

    Messages and tools may be JSON text. settings: as in `Layout`.
    """
    named: list[tuple[str, str | None, str, Use]] = [
        ("messages_key", messages_key, MESSAGES, "messages"),
        *(("prompt_key", name, f"{PROMPT}{i}", "turn") for i, name in enumerate(prompt_key)),
        ("completion_key", completion_key, COMPLETION, "turn"),
        ("tools_key", tools_key, TOOLS, "messages"),
    ]
    required = (MESSAGES, f"{PROMPT}0", COMPLETION)
    return Layout(
        tuple(
            Column(settings[key], name, ours, use, is_required=ours in required)
            for key, name, ours, use in named
            if name is not None
        ),
        settings,
    )


def document_layout(data: Data) -> Layout:
    """Return the layout of a run's documents."""
    if not data.is_chat:
        return text_layout(data.text_key)
    return chat_layout(data.messages_key, data.tools_key, DATA_SETTINGS, data.prompt_key, data.completion_key)


def run_layout(config: RunConfig, *, is_validation: bool = False) -> Layout:
    """Return the columns of documents, or of prompts for a run that samples, including teacher context columns.

    is_validation: also include the domain column.
    """
    layout, validation = document_layout(config.data), config.data.validation
    reads_texts = config.data.is_chat and not config.data.has_chat_validation
    if is_validation and (reads_texts or validation.text_key is not None):
        layout = text_layout(validation.text_key or TEXT, {"text_key": "data.validation.text_key"})
    reward = config.reward if config.rollout is not None else None
    if config.rollout is not None:
        layout = layout.with_prompts(reward.answer_column if reward else None, config.data.response_key)
    if config.routing is not None:
        layout = layout.with_routes(config.routing.key, config.active_names)
    fields = [] if reward is None else [(name, f"reward.{setting}") for name, setting in reward.named_columns.items()]
    layout = layout.with_fields([*fields, *_context_fields(config)]).for_reward(reward)
    domain_key = config.data.domain_key if is_validation else None
    return layout if domain_key is None else layout.with_domains(domain_key)


def domain_column(config: RunConfig) -> str | None:
    """Return our name of the domain column of validation texts, or None without one."""
    key = config.data.domain_key
    return None if key is None else run_layout(config, is_validation=True).columns[key]


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
