"""Settings as documentation: sections, their tables of keys, and the meaning of each key."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from nemo_opd.config.problems import models_in


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
