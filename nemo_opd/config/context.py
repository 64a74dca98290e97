"""A teacher's own prompt, which replaces the student's (methods.md §13)."""

from collections.abc import Iterator
from string import Formatter
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator, model_validator

from nemo_opd.config.base import Excludes, MayChange, Needs, Settings

PROMPT = "prompt"
"""Name of the student's prompt in a template: the text, or the user's last message."""


def _can_be_read(template: str) -> str:
    field_names(template)
    return template


Template = Annotated[str, AfterValidator(_can_be_read)]
"""Text with names in braces."""


class Context(Settings):
    """A teacher's own prompt before the response that is compared. The student never reads it."""

    system_prompt: Template | None = None
    """With conversations: the system message that the teacher reads instead. May name columns as `template` does."""
    template: Template | None = None
    r"""Text that the teacher reads instead of the prompt or, in a conversation, of the user's last message. `{prompt}`
    stands for the replaced text, any other name in braces for a column, as in `{prompt}\n\nA solution: {solution}`;
    `{{` and `}}` are braces.
    """
    key: Annotated[str | None, Excludes("template")] = None
    """The column with the whole prompt that the teacher reads: a text, or messages without the response."""
    gap_every: MayChange[int | None] = Field(None, ge=1)
    """Steps between measurements of the privilege gap (methods.md §13.1), for which the teacher reads the step's
    responses twice more. null: not measured.
    """
    contrast: Annotated[MayChange[bool], Needs("gap_every")] = False
    """Also measure the gap with the context of another record: a third reading."""

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
                "it does not say what the teacher reads; set template, key or system_prompt, or leave context out"
            )
        return self

    @model_validator(mode="after")
    def contrast_needs_a_field(self) -> "Context":
        if self.contrast and not self.fields:
            raise ValueError(
                "contrast=true: the context names no field of the record, so it is the same for another record; name "
                "one in template, such as {solution}, or write contrast=false"
            )
        return self

    @property
    def replaces_question(self) -> bool:
        """Whether the teacher reads another question than the student, not only another system message."""
        return self.template is not None or self.key is not None

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the record's fields that the context uses."""
        templates = [template for template in (self.system_prompt, self.template) if template is not None]
        names = [name for template in templates for name in field_names(template)]
        keys = [] if self.key is None else [self.key]
        return tuple(dict.fromkeys(name for name in (*keys, *names) if name != PROMPT))

    def named_in(self, field: str) -> str:
        """Return the setting that uses a field."""
        if field == self.key:
            return "key"
        return "template" if self.template is not None and field in field_names(self.template) else "system_prompt"


def field_names(template: str) -> list[str]:
    """Return the names in braces, in order. Raises ValueError for an invalid template."""
    return [name for _, name, *_ in _parts(template) if name is not None]


def filled(template: str, values: dict[str, str]) -> str:
    """Fill in the value of each name. Values may contain braces."""
    return "".join(literal + ("" if name is None else values[name]) for literal, name in _parts(template))


def _parts(template: str) -> Iterator[tuple[str, str | None]]:
    """Yield literal text and the name that follows it; the name is None after the last text."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error} in {template[:60]!r}; write {{{{ and }}}} for braces that are text") from error
    for literal, name, form, conversion in parts:
        if name is not None and (not name.strip() or form or conversion):
            raise ValueError(
                f"{{{name}}} in {template[:60]!r} is not a field's name; write the name alone, as {{solution}}, and "
                "{{ and }} for braces that are text"
            )
        yield literal, name
