"""Settings as documentation: the reference of all settings, and the text of `--help`."""

import difflib
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from nemo_opd.config.base import groups, models_in, options, recipes
from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.config.run import RunConfig
from nemo_opd.config.schema import write_schemas
from nemo_opd.errors import ConfigError
from nemo_opd.paths import configs_dir


@dataclass(frozen=True)
class Key:
    name: str
    type: str
    """Empty for a section."""
    default: str
    """`required` if a value must be given; empty for a section."""
    meaning: str


@dataclass(frozen=True)
class Table:
    tag: str
    """Type of the settings; empty for keys that all types share."""
    meaning: str
    keys: tuple[Key, ...]


@dataclass(frozen=True)
class Section:
    name: str
    """Path such as `teachers.loss`."""
    depth: int
    """0 for a top-level section."""
    meaning: str
    tables: tuple[Table, ...]


def sections(model: type[BaseModel]) -> Iterator[Section]:
    """Yield all sections, each before its subsections."""
    printed: dict[type[BaseModel], str] = {}
    for name in model.model_fields:
        yield from _section(name, model, name, 0, printed)


def section(key: str, owner: type[BaseModel], name: str, depth: int = 0) -> Iterator[Section]:
    """Yield the section at a field and its subsections; nothing if the field is not a section."""
    return _section(key, owner, name, depth, {})


def _section(
    key: str, owner: type[BaseModel], name: str, depth: int, printed: dict[type[BaseModel], str]
) -> Iterator[Section]:
    """Yield a section and its subsections.

    printed: the section that first printed each model; later choices of the same types refer to it.
    """
    models = models_in(owner.model_fields[name].annotation)
    if len(models) > 1 and all(model in printed for model in models):
        tags = ", ".join(map(_tag, models))
        yield Section(key, depth, f"{meaning_of(owner, name)} The types of `{printed[models[0]]}`: {tags}.".strip(), ())
        return
    for model in models:
        printed.setdefault(model, key)
    if models:
        yield Section(key, depth, meaning_of(owner, name), tuple(_tables(models)))
    inner = {f"{key}.{field}": (model, field) for model in models for field in model.model_fields}
    for path, (model, field) in inner.items():
        yield from _section(path, model, field, depth + 1, printed)


def _tables(models: list[type[BaseModel]]) -> Iterator[Table]:
    first = models[0]
    if len(models) == 1:
        yield Table("", "", keys_of(first))
        return
    common = {name for name in first.model_fields if all(_is_same_field(name, first, model) for model in models)}
    yield Table("", "", keys_of(first, without=first.model_fields.keys() - common))
    for model in models:
        yield Table(_tag(model), _in_one_line(model.__doc__ or ""), keys_of(model, without={"type", *common}))


def keys_of(model: type[BaseModel], without: Any = ()) -> tuple[Key, ...]:
    """Return the keys of one type of settings."""
    fields = {name: field for name, field in model.model_fields.items() if name not in without}
    return tuple(
        Key(name, _type_of(field), _default_of(field), meaning_of(model, name)) for name, field in fields.items()
    )


def meaning_of(model: type[BaseModel], name: str) -> str:
    """Return a key's meaning in one line; for a type tag, the meaning of its type."""
    field = model.model_fields[name]
    is_tag = name == "type" and len(get_args(field.annotation)) == 1
    return _in_one_line(field.description or (is_tag and model.__doc__) or "")


def _is_same_field(name: str, a: type[BaseModel], b: type[BaseModel]) -> bool:
    return name != "type" and name in b.model_fields and repr(a.model_fields[name]) == repr(b.model_fields[name])


def _tag(model: type[BaseModel]) -> str:
    field = model.model_fields.get("type")
    return ", ".join(map(str, get_args(field.annotation))) if field else model.__name__


def _type_of(field: FieldInfo) -> str:
    return "" if models_in(field.annotation) else _type_name(field.annotation)


def _type_name(annotation: Any) -> str:
    """Format a type for readers, without bounds: `int | null`, `list[float]`, `auto | cpu`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " | ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in arguments)
    if origin in (Union, UnionType):
        return " | ".join(map(_type_name, arguments))
    if origin is tuple:
        return (
            f"list[{', '.join(dict.fromkeys(_type_name(argument) for argument in arguments if argument is not ...))}]"
        )
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type_name, arguments))}]"
    return (
        "null" if annotation is NoneType else "path" if annotation is Path else getattr(annotation, "__name__", "any")
    )


def _default_of(field: FieldInfo) -> str:
    if models_in(field.annotation):
        return ""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return ""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


PAGE = "docs/settings.md"


def page() -> str:
    """Return the Markdown page: a table for each section, and one for each type that adds keys."""
    return "\n".join(
        (
            "# Settings",
            "",
            "Made by `uv run python -m nemo_opd.config.reference` from the models in `nemo_opd/config/`. On the",
            "command line a setting is `section.key=value`, or `teachers.0.key=value` for an element of a list.",
            *(line for part in sections(RunConfig) for line in _section_page(part)),
            "",
            "## evaluate.py",
            "",
            *_table_page(keys_of(EvaluationConfig)),
            *(
                line
                for part in section("evaluate.py: data", EvaluationConfig, "data", 1)
                for line in _section_page(part)
            ),
            "",
        )
    )


def _section_page(section: Section) -> Iterator[str]:
    yield from ("", f"{'#' * (2 + section.depth)} {section.name}")
    if section.meaning:
        yield from ("", section.meaning)
    for table in section.tables:
        yield ""
        if table.tag:
            yield from (f"**`type: {table.tag}`** {table.meaning}".rstrip(), "")
        yield from _table_page(table.keys)


def _table_page(keys: Iterable[Key]) -> Iterator[str]:
    rows = [
        (
            f"`{key.name}`",
            f"`{key.type}`" if key.type else "see its section",
            key.default if key.default in ("", "required") else f"`{key.default}`",
            key.meaning,
        )
        for key in keys
    ]
    if rows:
        yield from ("| key | type | default | meaning |", "|---|---|---|---|")
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


if __name__ == "__main__":
    write_schemas(configs_dir())
    print(page(), end="")


_WIDTH = 80


def help_text(model: type[BaseModel], config_dir: Path, program: str, only: Sequence[str] = ()) -> str:
    """Return usage, group options and all settings, or only the settings of the sections `only`.

    Raises ConfigError for an unknown section.
    """
    all_sections = list(sections(model))
    if only:
        return "\n".join(line for name in only for line in _with_subsections(name, all_sections))
    usage = _usage(model, config_dir, program, all_sections)
    return "\n".join((*usage, *(line for section in all_sections for line in _section_text(section))))


def _with_subsections(name: str, all_sections: Sequence[Section]) -> Iterator[str]:
    matches = [section for section in all_sections if section.name == name or section.name.startswith(f"{name}.")]
    if not matches:
        close = difflib.get_close_matches(name, [section.name for section in all_sections], n=1)
        top_level = ", ".join(section.name for section in all_sections if not section.depth)
        way_out = f"did you mean {close[0]}?" if close else f"choose one of {top_level}"
        raise ConfigError(f"--help {name}: there is no such section; {way_out}")
    for section in matches:
        yield from _section_text(section)


def _usage(model: type[BaseModel], config_dir: Path, program: str, all_sections: Sequence[Section]) -> Iterator[str]:
    yield from (f"{program} [--config FILE] [GROUP=OPTION …] [KEY=VALUE …]", "")
    yield from ("--config FILE      start from your own file, or from one of the recipes", "")
    yield from (_entry("recipes:", ", ".join(recipes(config_dir))), "")
    yield from ("--help SECTION     show one section", "--cfg job          print the settings and end")
    yield "--multirun KEY=1,2 a run with each value"
    if model is RunConfig:
        yield "run.dry_run=true   check everything and end"
    yield from ("", "Options of a group, as GROUP=OPTION (a file in a folder of this name):")
    for group in groups(config_dir, model):
        yield _entry(f"{group}:", ", ".join(options(config_dir, group)))
    yield from ("", "Sections:", _entry("", ", ".join(section.name for section in all_sections if not section.depth)))
    yield from ("", "Settings, as KEY=VALUE (as a page: docs/settings.md):")
    single = tuple(key for key in keys_of(model) if not models_in(model.model_fields[key.name].annotation))
    yield from _table_text("", Table("", "", single))


def _section_text(section: Section) -> Iterator[str]:
    yield from ("", *_wrapped(f"{section.name}: {section.meaning}", 0))
    prefix = section.name.replace("teachers", "teachers.0", 1) if section.name.startswith("teachers") else section.name
    for table in section.tables:
        if table.tag:
            yield from ("", *_wrapped(f"{section.name} of type={table.tag}: {table.meaning}", 0))
        yield from _table_text(f"{prefix}.", table)


def _table_text(prefix: str, table: Table) -> Iterator[str]:
    for key in table.keys:
        if key.type:  # sections have their own entry
            yield from _key(prefix, key)


def _key(prefix: str, key: Key) -> Iterator[str]:
    default = key.default if key.default == "required" else f"default {key.default}"
    yield from _wrapped(f"{prefix}{key.name}  ({key.type}; {default})", 2)
    yield from _wrapped(key.meaning, 6)


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2), break_on_hyphens=False
    )


def _entry(name: str, content: str) -> str:
    return textwrap.fill(
        f"{name:<13} {content}", _WIDTH, initial_indent="  ", subsequent_indent=" " * 16, break_on_hyphens=False
    )
