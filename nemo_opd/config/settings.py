"""Base class of all settings, the options of config groups, and messages about wrong values."""

import difflib
import json
import re
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Never, Self, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from nemo_opd.config.other_trainers import translate
from nemo_opd.config.secrets import MASK, is_secret_name

_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V", bound=Hashable)

YEAR_S = 365 * 86400.0
"""Longest time limit in seconds; functions that wait overflow on much larger numbers."""
_MOST_SUGGESTIONS = 3
_EMPTY = "it is empty; write a value, or leave the key out"


class Settings(BaseModel):
    """Base of all settings: frozen, and an unknown key is an error. A field's docstring is its description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def numbers_are_not_true_or_false(cls, data: object) -> object:
        for name, value in data.items() if isinstance(data, Mapping) else ():
            elements = value if isinstance(value, list | tuple) else (value,)
            if name in cls.model_fields and any(isinstance(element, bool) for element in elements):
                types = [*_types_in(cls.model_fields[name].annotation)]
                # pydantic takes true as 1
                if bool not in types and any(number in types for number in (int, float, timedelta)):
                    raise ValueError(f"{name}={setting_text(value)}: must be a number, not true or false")
        return data

    @field_validator("*")
    @classmethod
    def no_value_is_empty(cls, value: object) -> object:
        if is_blank(value):  # `key=`, or a shell variable that is not set
            raise ValueError(_EMPTY)
        # A lone line break is allowed, as a stop text of answers.
        if isinstance(value, tuple) and any(isinstance(element, str) and not element.strip(" ") for element in value):
            raise ValueError("an element is empty; write a value, or leave the element out")
        return value

    @model_validator(mode="after")
    def every_value_has_an_effect(self) -> Self:
        for name, field in type(self).model_fields.items():
            rules = [item for item in field.metadata if isinstance(item, Needs | Excludes)]
            # null turns a setting off, so no request is ignored.
            if not rules or (value := getattr(self, name)) in (None, field.get_default(call_default_factory=True)):
                continue
            if reason := next(filter(None, (rule.broken_by(name, self) for rule in rules)), None):
                raise ValueError(f"{name}={setting_text(value)} has no effect {reason}")
        return self


def _types_in(annotation: Any) -> Iterator[Any]:
    """Yield an annotation and all types inside of it."""
    yield annotation
    for argument in get_args(annotation):
        yield from _types_in(argument)


_SHOWN = 40
"""Longest value that a message shows besides the wrong one."""


@dataclass(frozen=True)
class Needs:
    """Annotation of a field that has an effect only with some values of another field of the same settings."""

    field: str
    values: tuple[object, ...] = ()
    """Values of the other field; if empty, any but null."""

    def broken_by(self, name: str, settings: Settings) -> str | None:
        """Return why the field `name` has no effect in these settings, and the way out; None if it has one."""
        value = getattr(settings, self.field)
        if value in self.values or (not self.values and value not in (None, ())):
            return None
        if not self.values:
            return f"without {self.field}; set {self.field}, or leave {name} out"
        *leading, last = map(setting_text, self.values)
        choice = f"{', '.join(leading)} or {last}" if leading else last
        return f"with {self.field}={setting_text(value)}; write {self.field}={choice}, or leave {name} out"


@dataclass(frozen=True)
class Excludes:
    """Annotation of a field that has no effect if another field of the same settings is set."""

    field: str

    def broken_by(self, name: str, settings: Settings) -> str | None:
        """Return why the field `name` has no effect in these settings, and the way out; None if it has one."""
        value = getattr(settings, self.field)
        if value in (None, ()):
            return None
        text = setting_text(value)
        return f"with {self.field}{f'={text}' if len(text) <= _SHOWN else ''}; leave one of the two out, or write null"


def setting_text(value: object) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(setting_text, value))}]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def is_blank(value: object) -> bool:
    return isinstance(value, str) and not value.strip()


def _one_is_a_list_of_one(value: object) -> object:
    if value == "":
        raise ValueError(_EMPTY)
    return () if value is None else (value,) if isinstance(value, str) else value


OneOrMore = Annotated[tuple[_T, ...], BeforeValidator(_one_is_a_list_of_one)]
"""Type of a list of texts that a single text can stand for, and null for an empty one."""


def _path_is_not_empty(value: object) -> object:
    if is_blank(value):  # `Path` would read it as the current directory
        raise ValueError(_EMPTY)
    return value


FilePath = Annotated[Path, BeforeValidator(_path_is_not_empty)]
"""Type of a file or folder."""
NAME, _USERS_CODE = r"^[A-Za-z0-9_.-]+$", r"^[\w.]+:\w+$"
"""Patterns."""
Name = Annotated[str, Field(pattern=NAME)]
"""Type of a name in metrics and folders."""
UsersCode = Annotated[str, Field(pattern=_USERS_CODE)]
"""Type of a function or class of the user, `package.module:name`."""
_FORMS = {NAME: "letters, digits, `_`, `.` and `-`", _USERS_CODE: "package.module:name"}
"""Descriptions of patterns."""


class _FrozenDict(dict[_K, _V]):
    """An immutable, hashable dict, which keeps settings that hold one frozen."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type, tuple[dict[_K, _V]]]:
        return _FrozenDict, (dict(self),)

    def _refuse(self, *_: object, **__: object) -> Never:
        raise TypeError("settings are frozen")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse


Frozen = Annotated[dict[_K, _V], AfterValidator(_FrozenDict)]
"""Type of a field with arbitrary keys."""

_MAY_CHANGE = "may change"
MayChange = Annotated[_T, _MAY_CHANGE]
"""Type of a field that may differ when a run is continued: the same results are computed with another value. A section
so marked may change in full.
"""


def may_change(field: FieldInfo) -> bool:
    return _MAY_CHANGE in field.metadata


def choices(union: Any) -> tuple[type[Settings], ...]:
    """Return the settings classes of a discriminated union."""
    classes: tuple[type[Settings], ...] = get_args(get_args(union)[0])
    return classes


def require_lines(needed: Iterable[str | type[Settings]], table: Container[Any], name: str) -> None:
    """Raise NotImplementedError if choices have no entry in a table. Called when the table's module is imported.

    name: the table's name and file, for the message.
    """
    missing = [choice if isinstance(choice, str) else choice.__name__ for choice in needed if choice not in table]
    if missing:
        raise NotImplementedError(f"{name} has no line for {', '.join(missing)}; add it (docs/extending.md)")


def recipes(config_dir: Path) -> list[str]:
    return _stems(config_dir)


def groups(config_dir: Path, model: type[BaseModel]) -> list[str]:
    """Return the config groups of a model's settings."""
    return sorted(folder.name for folder in config_dir.iterdir() if folder.name in model.model_fields)


def options(config_dir: Path, group: str) -> list[str]:
    """Return the options of a group; empty if the group does not exist."""
    return _stems(config_dir / group)


def _stems(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.yaml"))


def explain_all(problems: Sequence[ErrorDetails], data: Mapping[str, Any], model: type[BaseModel]) -> Iterator[str]:
    """Yield a line for each wrong value.

    Pydantic reports a wrong value once for each type of a union, and wrong elements of a list as missing. Only the
    innermost place is reported, once. Missing values come last: they may be there under wrong keys.
    """
    by_path: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for problem in problems:
        path = _real_path(problem["loc"], data, ends_in_key=problem["type"] != "value_error")
        by_path.setdefault(tuple(path), []).append(problem)
    for place, reports in sorted(by_path.items(), key=lambda item: item[1][0]["type"] == "missing"):
        if not any(inner[: len(place)] == place for inner in by_path if len(inner) > len(place)):
            yield _explain(list(place), reports, data, model)


def _explain(
    path: list[int | str], problems: Sequence[ErrorDetails], data: Mapping[str, Any], model: type[BaseModel]
) -> str:
    """Format `key=value: reason; way out`, with the key as typed on the command line."""
    problem = problems[0]
    kind, value = problem["type"], problem["input"]
    key = ".".join(map(str, path))
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    if path and isinstance(value, str) and is_secret_setting(str(path[-1])):
        text = MASK
    reason = " or ".join(dict.fromkeys(map(_reason_of, problems))).replace(" or must be", " or")
    if is_blank(value) and kind not in ("extra_forbidden", "value_error"):
        return f"{key}: {_EMPTY}"
    if kind == "extra_forbidden":
        shown = key if isinstance(value, Mapping) else f"{key}={text}"
        return _with_removal(f"{shown}: there is no such key{_suggestion(path, value, data, model)}")
    if kind == "missing":
        is_explained = "." in key and key in all_keys(model)
        way_out = f"; write {key}=VALUE, which --help {key} explains" if is_explained else ""
        return f"{key}: required, but not given{way_out}"
    if kind == "union_tag_not_found":
        types = ", ".join(map(repr, _types_with_key([*path, "type"], data, model)))
        return f"{key}.type: required, but not given; choose one of {types}"
    if kind == "union_tag_invalid" and is_blank(value["type"]):
        return f"{key}.type: {_EMPTY}"
    if kind == "union_tag_invalid":
        tags = problem["ctx"]["expected_tags"]
        is_code = "'function'" in tags and re.fullmatch(_USERS_CODE, str(value["type"])) is not None
        advice = f"; for your own function, write {key}.type=function {key}.function={value['type']}" if is_code else ""
        return f"{key}.type={value['type']!r}: choose one of {tags}{advice}"
    if kind in ("model_type", "model_attributes_type"):
        keys = ", ".join(_keys_at(path, data, model))
        return f"{key}={text}: a group of keys, not one value; set {key}.KEY of {keys}"
    if kind == "value_error":
        return _with_removal(_placed(reason, key, value, text, _keys_at(path, data, model)))
    if kind == "string_type" and len(problems) == 1 and isinstance(value, int | float):
        reason += f"; to make text of it, write {key}=\"'{value}'\""
    if kind == "literal_error" and value is not None and (owners := _types_with_key(path, data, model, value)):
        reason += f"; {text} is for {'.'.join(map(str, path[:-1]))}.type={', '.join(owners)}"
    message = f"{key}={text}: {reason[0].lower()}{reason[1:]}"
    field = all_keys(model).get(re.sub(r"\.\d+", ".0", key))
    has_default = value is None and field is not None and not field.is_required()
    return _with_removal(f"{message}; leave it out") if has_default else message


def _with_removal(message: str) -> str:
    """Add to the advice `key=…: …; leave it out` the override that removes a setting which a file or a preset has."""
    key = message.partition("=")[0]
    is_advised = re.search(rf"leave (it|this|{re.escape(key.rpartition('.')[2])}) out$", message)
    return f"{message} (~{key})" if is_advised and not re.search(r"\.\d", key) else message


_REMEDY = re.compile(r"(?<= has no effect )([^;]*; (?:write|set)) (\w+)")
"""The key that `Needs` tells to write."""


def _placed(reason: str, key: str, value: object, text: str, inner: Sequence[str]) -> str:
    """Combine the key with a reason from our own validators: `key.inner=…`, `key=value: …`, or `key: …` if the reason
    names the value.

    text: the value as shown. inner: keys of the section, if the key is a section's.
    """
    if not key:
        return reason
    if (name := re.match(r"(\w+)[\w.]*(=|: )", reason)) and name[1] in inner:
        return f"{key}.{_REMEDY.sub(lambda m: f'{m[1]} {key}.{m[2]}' if m[2] in inner else m[0], reason)}"
    is_named = not isinstance(value, str | int | float) or is_blank(value) or repr(value)[:50] in reason
    return f"{key}: {reason}" if is_named else f"{key}={text}: {reason}"


def _reason_of(problem: ErrorDetails) -> str:
    """Return pydantic's reason in our wording."""
    reason = problem["msg"].removeprefix("Value error, ")
    reason = re.sub("^(Input|String) should", "must", reason)
    reason = reason.partition(", unable to parse")[0]
    if problem["type"] == "string_pattern_mismatch" and (form := _FORMS.get(problem["ctx"]["pattern"])):
        return f"must be {form}"
    if problem["type"] in ("bool_type", "bool_parsing"):
        return "must be true or false"
    if problem["type"] == "literal_error":
        reason = reason.replace("True", "true").replace("False", "false")
    return reason.replace("valid tuple", "list").replace("Tuple should", "must")


def _real_path(location: tuple[int | str, ...], data: Any, *, ends_in_key: bool) -> list[int | str]:
    """Remove the parts that pydantic adds to a location for members of a union: tags and type names.

    ends_in_key: the last part may be a missing key, and is not a tag.
    """
    path: list[int | str] = []
    is_tag_passed = False
    """Whether the tag of `data` was passed; a key with the tag's name may follow."""
    for i, part in enumerate(location):
        may_be_tag = not is_tag_passed and (i + 1 < len(location) or not ends_in_key)
        # A type with a default may be left out.
        is_default = isinstance(data, Mapping) and "type" not in data and part not in data
        if may_be_tag and isinstance(data, Mapping) and (data.get("type") == part or is_default):
            is_tag_passed = True
            continue
        is_tag_passed = False
        if isinstance(part, str) and path and not isinstance(data, Mapping) and data is not None:
            continue
        path.append(part)
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, Sequence) and isinstance(part, int):
            data = data[part] if part < len(data) else None  # a missing element has a place too
    return path


def _suggestion(path: list[int | str], value: object, data: Mapping[str, Any], model: type[BaseModel]) -> str:
    siblings, section = _keys_at(path[:-1], data, model), ".".join(map(str, path[:-1]))
    if owners := _types_with_key(path, data, model):
        return f"; it belongs to {section}.type={', '.join(owners)}; write this type, or leave it out"
    if translations := [text for word in (str(path[-1]), *_keys_in_value(value)) for text in translate(word)]:
        return f"; {'; '.join(dict.fromkeys(translations))}"
    if isinstance(value, Mapping) and value and all(inner in siblings for inner in value):
        return f"; did you mean {', '.join('.'.join(map(str, [*path[:-1], inner])) for inner in value)}?"
    keys = keys_named(str(path[-1]), model)
    inside = [key for key in keys if key.startswith(f"{section}.")]
    close = difflib.get_close_matches(str(path[-1]), siblings, n=1)
    if close and not inside:
        return f"; did you mean {'.'.join(map(str, [*path[:-1], close[0]]))}?"
    if keys := inside or keys:
        return f"; did you mean {' or '.join(keys)}?"
    return f"; known here: {', '.join(siblings)}" if siblings else ""


def _keys_in_value(value: object) -> Iterator[str]:
    """Yield the keys inside an unknown section, as other trainers have sections of their own."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _keys_in_value(inner)


def all_keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of the settings and of all sections inside, by key; an element of a list has the number 0."""
    return dict(_walk(model, "", ()))


def _walk(model: type[BaseModel], prefix: str, outer: tuple[type[BaseModel], ...]) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        element = (
            ".0" if any(get_origin(part) is tuple for part in (field.annotation, *get_args(field.annotation))) else ""
        )
        for inner in models_in(field.annotation):
            if inner not in outer:
                yield from _walk(inner, f"{prefix}{name}{element}.", (*outer, model))


def keys_named(word: str, model: type[BaseModel]) -> list[str]:
    """Return up to three keys that end in a word, such as `student.optimizer.lr` for `lr`, the shortest first."""
    keys = [key for key in all_keys(model) if f".{key}".endswith(f".{word}")]
    return sorted(keys, key=lambda key: key.count("."))[:_MOST_SUGGESTIONS]


def is_secret_setting(name: str) -> bool:
    """Return whether the value of a setting with this name is a secret; `answer_key` and the like name a column."""
    return is_secret_name(name) and (name == "api_key" or not _is_field(name, Settings))


def _is_field(name: str, model: type[BaseModel]) -> bool:
    """Return whether the model or one derived from it has this field."""
    return name in model.model_fields or any(_is_field(name, derived) for derived in model.__subclasses__())


def _types_with_key(path: Sequence[int | str], data: Any, model: type[BaseModel], choice: object = None) -> list[str]:
    """Return the types of the enclosing settings that have this key; if `choice` is given, only types that offer it."""
    members, _ = _models_at(path[:-1], data, model)
    owners = [member for member in members if path[-1] in member.model_fields and "type" in member.model_fields]
    if choice is not None:
        owners = [owner for owner in owners if choice in _choices(owner.model_fields[str(path[-1])].annotation)]
    return [str(tag) for owner in owners for tag in get_args(owner.model_fields["type"].annotation)]


def _choices(annotation: Any) -> list[Any]:
    """Return the values of the Literals in an annotation."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return list(arguments)
    return [choice for argument in arguments for choice in _choices(argument)]


def _keys_at(path: Sequence[int | str], data: Any, model: type[BaseModel]) -> list[str]:
    """Return the keys that `model` accepts at `path`, given the `type` tags in the data."""
    _, models = _models_at(path, data, model)
    return list(dict.fromkeys(name for model in models for name in model.model_fields))


def _models_at(
    path: Sequence[int | str], data: Any, model: type[BaseModel]
) -> tuple[list[type[BaseModel]], list[type[BaseModel]]]:
    """Return all models that `model` allows at `path`, and the ones that match the `type` in the data."""
    members = models = [model]
    is_name = False
    """Whether the next part is a user's name, as that of a question set."""
    for part in path:
        data = data[part]
        if isinstance(part, str) and not is_name:
            fields = [model.model_fields[part].annotation for model in models if part in model.model_fields]
            members = models = [model for annotation in fields for model in models_in(annotation)]
            is_name = any(get_origin(annotation) is dict for annotation in fields)
        else:
            is_name = False
        tag = data.get("type") if isinstance(data, Mapping) else None
        models = [model for model in models if tag is None or _accepts_tag(model, tag)] or models
    return members, models


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def _accepts_tag(model: type[BaseModel], tag: object) -> bool:
    field = model.model_fields.get("type")
    return field is not None and tag in get_args(field.annotation)
