"""The columns that a run reads of its data."""

from nemo_opd.config.run import RunConfig
from nemo_opd.data.layout import Layout, text_layout
from nemo_opd.data.layout import layout_of as data_layout
from nemo_opd.data.record import TEXT


def layout_of(config: RunConfig, *, is_validation: bool = False) -> Layout:
    """Return the columns of documents, or of prompts for a run that samples, including teacher context columns.

    is_validation: also include the domain column.
    """
    layout = data_layout(config.data)
    if is_validation and config.data.is_chat and not config.data.has_chat_validation:
        layout = text_layout(config.data.validation.text_key or TEXT, "data.validation")
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
    return None if key is None else layout_of(config, is_validation=True).columns[key]


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
