"""A teacher's own prompt, in place of the student's (methods.md §13)."""

from collections.abc import Iterator
from string import Formatter

from pydantic import Field, field_validator, model_validator

from nemo_opd.config.base import Settings

PROMPT = "prompt"
"""Name by which a template reads the student's prompt: the text, or the user's last message."""


def field_names(template: str) -> list[str]:
    """Return the names in braces, in order. Raises ValueError for a template that cannot be read."""
    return [name for _, name, *_ in _parts(template) if name is not None]


def _parts(template: str) -> Iterator[tuple[str, str | None]]:
    """Yield literal text and the name that follows it, None after the last."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error} in {template[:60]!r}; write {{{{ and }}}} for braces that are text") from error
    for literal, name, form, conversion in parts:
        if name is not None and (not name.strip() or form or conversion):
            raise ValueError(
                f"{{{name}}} in {template[:60]!r} is no name of a field; write the name alone, as {{solution}}, and "
                "{{ and }} for braces that are text"
            )
        yield literal, name


def filled(template: str, values: dict[str, str]) -> str:
    """Return the template with the value of each name. Values may have braces."""
    return "".join(literal + ("" if name is None else values[name]) for literal, name in _parts(template))


class Context(Settings):
    """A teacher's own prompt, before the response that it is compared on. None of it reaches the student."""

    system_prompt: str | None = None
    """With conversations: the system message that the teacher reads in place of the conversation's own. May name fields
    of the record, as `template` does.
    """
    template: str | None = None
    """Text that the teacher reads in place of the prompt's or, in a conversation, of the user's last message:
    `{prompt}` stands for that, any other name in braces for a column of the record, such as
    `{prompt}\\n\\nA solution: {solution}`. `{{` and `}}` are braces.
    """
    key: str | None = None
    """Column with the whole prompt that the teacher reads: a text, or messages without the response."""
    gap_every: int | None = Field(None, ge=1)
    """Steps between measurements of the privilege gap, mean(log q(y | context) − log q(y)), for which the teacher reads
    the step's responses twice more, with its context and without; null: it is not measured.
    """
    contrast: bool = False
    """Measure the gap with the context of another record as well: a third reading."""

    @field_validator("system_prompt", "template")
    @classmethod
    def templates_can_be_read(cls, value: str | None) -> str | None:
        if value is not None:
            field_names(value)
        return value

    @field_validator("template")
    @classmethod
    def templates_name_something(cls, value: str | None) -> str | None:
        if value is not None and not field_names(value):
            raise ValueError(
                f"{value[:60]!r} names nothing, so the teacher would read the same text before every response; name "
                "columns of the record, such as {solution}, or {prompt}, the student's own"
            )
        return value

    @model_validator(mode="after")
    def something_is_added(self) -> "Context":
        if self.system_prompt is None and self.template is None and self.key is None:
            raise ValueError(
                "it names nothing that the teacher reads; set template, key or system_prompt, or leave context out"
            )
        return self

    @model_validator(mode="after")
    def the_prompt_has_one_origin(self) -> "Context":
        if self.template is not None and self.key is not None:
            raise ValueError(
                f"key={self.key} is the teacher's whole prompt, and so is what template makes; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def contrast_needs_a_gap(self) -> "Context":
        if self.contrast and self.gap_every is None:
            raise ValueError(
                "contrast=true measures the privilege gap with another record's context in addition to the gap, which "
                "is not measured; set gap_every, such as gap_every=50, or contrast=false"
            )
        return self

    @model_validator(mode="after")
    def contrast_needs_a_field(self) -> "Context":
        if self.contrast and not self.fields:
            raise ValueError(
                "contrast=true: the context names no field of the record, so another record has the same; name one in "
                "template, such as {solution}, or write contrast=false"
            )
        return self

    @property
    def replaces_question(self) -> bool:
        """Whether the teacher reads another question than the student, not another system message alone."""
        return self.template is not None or self.key is not None

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the record's fields that are read."""
        templates = [each for each in (self.system_prompt, self.template) if each is not None]
        names = [name for template in templates for name in field_names(template)]
        own = [] if self.key is None else [self.key]
        return tuple(dict.fromkeys(name for name in (*own, *names) if name != PROMPT))

    def named_in(self, field: str) -> str:
        """Return the setting that names a field."""
        if field == self.key:
            return "key"
        return "template" if self.template is not None and field in field_names(self.template) else "system_prompt"
