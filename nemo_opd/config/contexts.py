"""Checks of teachers' contexts against the data. Each raises ValueError with the way out."""

from nemo_opd.config.context import Context
from nemo_opd.config.run_fields import RunFields


def check_contexts(config: RunFields) -> None:
    """Check the context of every teacher that has one."""
    for i, teacher in enumerate(config.teachers):
        if teacher.context is not None:
            _check_prompts(config, teacher.context, f"teachers.{i}.context")
            _check_fields(config, teacher.context, f"teachers.{i}.context")


def _check_prompts(config: RunFields, context: Context, key: str) -> None:
    """Check that the data have prompts of the kind that the context replaces."""
    if config.data.messages_key is not None:
        return
    if config.rollout is None:
        raise ValueError(
            f"{key}: the texts of data.text_key={config.data.text_key} have no prompt that a context could replace; "
            "set data.messages_key for conversations, add rollout=hf for prompts, or leave "
            f"{key} out"
        )
    if context.system_prompt is not None:
        raise ValueError(
            f"{key}.system_prompt: prompts of data.text_key={config.data.text_key} are texts, which have no system "
            f"message; write it at the start of {key}.template, or set data.messages_key for conversations"
        )


def _check_fields(config: RunFields, context: Context, key: str) -> None:
    """Check that fields are columns, and not columns that other settings use."""
    data = config.data
    if context.fields and (data.train.text_files or data.validation.text_files):
        raise ValueError(
            f"{key}.{context.named_in(context.fields[0])} names the column {context.fields[0]!r}, and text_files have "
            "none; give arrow_files, parquet_files, jsonl_files or hub"
        )
    used = {"data.tools_key": data.tools_key, "aggregation.key": config.routing and config.routing.key}
    if data.messages_key is None:
        used["data.text_key"] = data.text_key
    else:
        used["data.messages_key"] = data.messages_key
    for setting, column in used.items():
        if column in context.fields:
            raise ValueError(
                f"{key}.{context.named_in(column)} names the column {column!r}, which {setting} names too; write "
                "{prompt} for the student's prompt, or name another column"
            )
