"""Settings as documentation: the page of all settings, the text of `--help`, and JSON schemas for editors that complete
and check YAML.
"""

import difflib
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.config.other_trainers import translate
from nemo_opd.config.run import RunConfig
from nemo_opd.config.settings import groups, models_in, options, recipes
from nemo_opd.config.short_form import REWARDS, SHORT, SOURCES
from nemo_opd.errors import ConfigError
from nemo_opd.files import write_atomically
from nemo_opd.paths import configs_dir

PAGE = "docs/settings.md"
SCHEMA_FOLDER = "schema"
"""Folder of the schemas, next to the groups."""
_DIALECT = "http://json-schema.org/draft-07/schema#"
_REFERENCE_TYPE = "Reference"
_CLASSES = {"data": "Data", "evaluation": "Evaluation", "evaluation.sets.*": "QuestionSet"}
"""Class of a run's section that contains one of `SOURCES` or `REWARDS`."""
_WIDTH = 80
"""Characters of a line of `--help`."""
_MANY = 3
"""Types from which on a key that they share is described once."""
_DROPPED_KEYS = frozenset({"required", "discriminator", "title"})
_RENAMED_KEYS = {"oneOf": "anyOf", "prefixItems": "items"}
"""`items` is the name of `prefixItems` in the dialect that editors support."""


@dataclass(frozen=True)
class _Key:
    name: str
    type: str
    """Empty for a section."""
    default: str
    """`required` if a value must be given; empty for a section."""
    meaning: str


@dataclass(frozen=True)
class _Table:
    tag: str
    """Type of the settings; empty for keys that several types share."""
    meaning: str
    keys: tuple[_Key, ...]


@dataclass(frozen=True)
class _Section:
    name: str
    """Path such as `teachers.loss`."""
    depth: int
    """0 for a top-level section."""
    meaning: str
    tables: tuple[_Table, ...]
    advice: tuple[tuple[str, str], ...] = ()
    """Type, and what to take it for, for each type that says so."""


def page() -> str:
    """Return the Markdown page: a list of keys for each section, and one for each type that adds keys."""
    parts = (
        *_sections(RunConfig),
        _Section("evaluate.py", 0, "", (_Table("", "", _keys_of(EvaluationConfig)),)),
        *_section("evaluate.py: data", EvaluationConfig, "data", 1, {}),
    )
    return "\n".join(
        (
            "# Settings",
            "",
            "Made by `uv run python -m nemo_opd.config.reference` from the models in `nemo_opd/config/`. On the",
            "command line a setting is `section.key=value`, or `teachers.0.key=value` for an element of a list.",
            "In brackets are the type of a value and the default. A key whose default is `null` may be left unset.",
            "Keys that an earlier section has are only named.",
            *(line for part in _without_repeats(parts) for line in _section_markdown(part)),
            "",
        )
    )


def _without_repeats(parts: Sequence[_Section]) -> Iterator[_Section]:
    """Yield the sections; several keys that an earlier table has with the same meaning are only named, and keys that
    are sections are left to their headings.
    """
    headings = {part.name: part.meaning for part in parts}
    first_place: dict[_Key, tuple[str, str]] = {}
    for part in parts:
        tables = []
        for table in part.tables:
            place = (part.name, table.tag)
            repeated: dict[tuple[str, str], list[_Key]] = {}
            for key in table.keys:
                if key.type and (earlier := first_place.setdefault(key, place)) != place:
                    repeated.setdefault(earlier, []).append(key)
            repeated = {earlier: keys for earlier, keys in repeated.items() if len(keys) > 1}
            inner = [
                key
                for key in table.keys
                if not key.type and headings.get(f"{part.name}.{key.name}", "").startswith(key.meaning or "?")
            ]
            named = [key for keys in repeated.values() for key in keys]
            remaining = tuple(key for key in table.keys if key not in named and key not in inner)
            sentences = [_reference(earlier, keys, part.name) for earlier, keys in repeated.items()]
            if inner and table.tag:
                sentences.insert(0, f"Sections: {_listed(inner)}.")
            tables.append(_Table(table.tag, " ".join((table.meaning, *sentences)).strip(), remaining))
        yield replace(part, tables=tuple(tables))


def _reference(place: tuple[str, str], keys: Iterable[_Key], section: str) -> str:
    """Return a sentence that names keys and the place that explains them."""
    name, tag = place
    where = f"`type: {tag}`" if name == section else f"[`{name}`](#{name.replace('.', '')})"
    if tag and name != section:
        where += f" of `type: {tag}`"
    return f"As in {where}: {_listed(keys)}."


def _listed(keys: Iterable[_Key]) -> str:
    return ", ".join(f"`{key.name}`" for key in keys)


def _section_markdown(section: _Section) -> Iterator[str]:
    yield from ("", f"{'#' * (2 + section.depth)} {section.name}")
    if section.meaning:
        yield from ("", section.meaning)
    if section.advice:
        yield from ("", *(f"* `type: {tag}`: take {when}" for tag, when in section.advice))
    for table in section.tables:
        tag = f"**`type: {table.tag}`** " if table.tag else ""
        if heading := f"{tag}{table.meaning}".rstrip():
            yield from ("", heading)
        if table.keys:
            yield ""
        for key in table.keys:
            yield _key_markdown(key)


def _key_markdown(key: _Key) -> str:
    """Return an element of a list: the key with its type and default, and its meaning."""
    if not key.type:  # a section
        return f"* `{key.name}`: {key.meaning}"
    kind = key.type.removesuffix(" | null") if key.default == "null" else key.type
    default = key.default if key.default == "required" else f"`{key.default}`"
    return f"* `{key.name}` (`{kind}`; {default}): {key.meaning}"


def help_text(model: type[BaseModel], config_dir: Path, program: str, only: Sequence[str] = ()) -> str:
    """Return usage, group options and all settings; or, for each of `only`, a section, a key, or the keys that have the
    word in their name or meaning.

    Raises ConfigError if nothing has the word.
    """
    all_sections = list(_sections(model))
    if only:
        return "\n".join(line for name in only for line in _with_subsections(name, all_sections))
    usage = _usage(model, config_dir, program, all_sections)
    return "\n".join((*usage, *(line for section in all_sections for line in _section_help(section))))


def _with_subsections(word: str, all_sections: Sequence[_Section]) -> Iterator[str]:
    name = re.sub(r"\.\d+(?=\.|$)", "", word)
    matches = [section for section in all_sections if section.name == name or section.name.startswith(f"{name}.")]
    matches = matches or [section for section in all_sections if section.name.endswith(f".{name}")]
    if matches:
        for section in matches:
            yield from _section_help(section)
        return
    tables = [(_prefix(section), table) for section in all_sections for table in section.tables]
    keys = [(prefix, table.tag, key) for prefix, table in tables for key in table.keys if key.type]
    full = [(f"{entry[0]}{entry[2].name}".replace(".0", ""), entry) for entry in keys]
    exact = [entry for key, entry in full if key == name] or [
        entry for key, entry in full if "." in name and key.endswith(f".{name}")
    ]
    mentions = re.compile(rf"\b{re.escape(word)}", re.IGNORECASE)
    matching = exact or [entry for entry in keys if mentions.search(f"{entry[2].name} {entry[2].meaning}")]
    translations = translate(word)
    if not matching and not translations:
        close = difflib.get_close_matches(name, [section.name for section in all_sections], n=1)
        top_level = ", ".join(section.name for section in all_sections if not section.depth)
        way_out = f"did you mean {close[0]}?" if close else f"choose one of {top_level}"
        raise ConfigError(f"--help {word}: there is no such section or key, and no key speaks of it; {way_out}")
    yield from translations
    for prefix, tag, key in dict.fromkeys(matching):
        yield from _key_help(f"{prefix[:-1]} of type={tag}: " if tag else prefix, key)


def _prefix(section: _Section) -> str:
    """Return the section's part of a key as typed, with the first element of a list."""
    return re.sub("^teachers", "teachers.0", section.name) + "."


def _usage(model: type[BaseModel], config_dir: Path, program: str, all_sections: Sequence[_Section]) -> Iterator[str]:
    yield from (f"{program} [FILE] [GROUP=OPTION …] [KEY=VALUE …]", "")
    yield from ("FILE               start from your own file, or from one of the recipes", "")
    yield from (_entry("recipes:", ", ".join(recipes(config_dir))), "")
    yield from (
        "--help WORD        show a section, a key, or all keys that speak of a word",
        "--cfg job          print the settings and end (--resolve: with references)",
    )
    yield "--multirun KEY=1,2 a run with each value"
    if model is RunConfig:
        yield "run.dry_run=true   check everything and end"
    yield from ("", "Options of a group, as GROUP=OPTION (a file in a folder of this name):")
    for group in groups(config_dir, model):
        yield _entry(f"{group}:", ", ".join(options(config_dir, group)))
    yield from ("", "Sections:", _entry("", ", ".join(section.name for section in all_sections if not section.depth)))
    yield from ("", "Settings, as KEY=VALUE (as a page: docs/settings.md):")
    single = tuple(key for key in _keys_of(model) if not models_in(model.model_fields[key.name].annotation))
    yield from _table_help("", _Table("", "", single))


def _section_help(section: _Section) -> Iterator[str]:
    yield from ("", *_wrapped(f"{section.name}: {section.meaning}", 0))
    if section.advice:
        yield from ("", *(f"  {tag:<14}take {when}" for tag, when in section.advice), "")
    for table in section.tables:
        if table.tag:
            yield from ("", *_wrapped(f"{section.name} of type={table.tag}: {table.meaning}", 0))
        elif table.meaning:
            yield from ("", *_wrapped(f"{section.name}: {table.meaning}", 0))
        yield from _table_help(_prefix(section), table)


def _table_help(prefix: str, table: _Table) -> Iterator[str]:
    for key in table.keys:
        if key.type:  # sections have their own entry
            yield from _key_help(prefix, key)


def _key_help(prefix: str, key: _Key) -> Iterator[str]:
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


def schemas(config_dir: Path) -> dict[str, str]:
    """Return JSON schemas by file name: of a run, of an evaluation, and of each group's options."""
    models: dict[str, type[BaseModel]] = {"run.json": RunConfig, "evaluation.json": EvaluationConfig}
    contents = {name: _recipe_schema(model, config_dir) for name, model in models.items()}
    for group in groups(config_dir, RunConfig):
        if get_origin(RunConfig.model_fields[group].annotation) is tuple:
            continue  # options of a list set the whole config: `# @package _global_`
        contents[f"{group}.json"] = {"$schema": _DIALECT, "$ref": f"run.json#/properties/{group}"}
    return {name: json.dumps(content, indent=1, ensure_ascii=False) + "\n" for name, content in contents.items()}


def _recipe_schema(model: type[BaseModel], config_dir: Path) -> dict[str, Any]:
    """Return the schema of a recipe: a model's settings, all optional as groups may set them, and the `defaults`."""
    schema = _partial(model.model_json_schema(ref_template="#/definitions/{model}"))
    definitions = schema.pop("$defs")
    definitions[_REFERENCE_TYPE] = {
        "type": "string",
        "pattern": r"^\$\{",
        "description": "A reference, such as ${oc.env:NAME}.",
    }
    choices = {
        group: {"anyOf": [{"enum": options(config_dir, group)}, {"type": ["string", "null"]}]}
        for group in groups(config_dir, model)
    }
    if model is RunConfig:
        sources = (source.rpartition(".") for source in (*SOURCES, *REWARDS))
        within = (
            (definitions[_CLASSES[section]]["properties"], key) for section, _, key in sources if section in _CLASSES
        )
        for fields, key in [*((schema["properties"], key) for key in SHORT), *within]:
            fields[key] = _or_strings(fields[key], is_list=key in ("teachers", "data", "train", "validation"))
    override = {f"override {group}": choice for group, choice in choices.items()}
    entry = {"anyOf": [{"type": "string"}, {"type": "object", "properties": choices | override}]}
    definitions["Defaults"] = {"type": "array", "items": entry}
    about = "An option of each group; `_self_` stands for this file."
    defaults = {"$ref": "#/definitions/Defaults", "description": about}
    schema["properties"] |= {"defaults": defaults}
    for group in choices:  # an option may build on another
        for inner in models_in(model.model_fields[group].annotation):
            definitions[inner.__name__]["properties"]["defaults"] = defaults
    return {"$schema": _DIALECT, **schema, "definitions": definitions}


def _or_strings(field: dict[str, Any], *, is_list: bool) -> dict[str, Any]:
    """Return the schema of a section that a string, or a list of strings, can stand for."""
    text = {"type": "string"}
    forms = [field, text, *([{"type": "array", "items": text}] if is_list else [])]
    return {key: field[key] for key in ("description",) if key in field} | {"anyOf": forms}


def _partial(schema: Any) -> Any:
    """Return the schema for part of the settings: nothing is required, and values may be references or, for a list, one
    element.

    A union's type may be given in another file, so several members may match.
    """
    if isinstance(schema, list):
        return [_partial(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    is_model = "properties" in schema
    plain = {_RENAMED_KEYS.get(key, key): value for key, value in schema.items() if key not in _DROPPED_KEYS}
    if is_model:
        plain["properties"] = {
            name: _value_or_reference(_partial(field)) for name, field in schema["properties"].items()
        }
        if tag := plain["properties"].get("type"):
            tag.setdefault("description", schema["description"])
        if "$defs" in plain:
            plain["$defs"] = {name: _partial(item) for name, item in schema["$defs"].items()}
        return plain
    return {key: _partial(value) for key, value in plain.items()}


def _value_or_reference(field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field's value or of a reference to one."""
    about = {key: field.pop(key) for key in ("description", "default") if key in field}
    choices = field["anyOf"] if set(field) == {"anyOf"} else [field]
    single = [choice["items"] for choice in choices if isinstance(choice.get("items"), Mapping)]
    is_text = any(
        choice.get("type") == "string" and not set(choice) & {"enum", "const", "pattern"} for choice in choices
    )
    reference = [] if is_text else [{"$ref": f"#/definitions/{_REFERENCE_TYPE}"}]
    nothing = [{"type": "null"}] if single and about.get("default") == [] else []
    return about | {"anyOf": [*choices, *single, *nothing, *reference]}


def _sections(model: type[BaseModel]) -> Iterator[_Section]:
    """Yield all sections, each before its subsections."""
    shown: dict[type[BaseModel], tuple[str, type[BaseModel]]] = {}
    for name, field in model.model_fields.items():
        for kind in models_in(field.annotation):
            for base in kind.__mro__[1:]:
                shown.setdefault(base, (name, kind))
    for name in model.model_fields:
        yield from _section(name, model, name, 0, shown)


def _section(
    key: str,
    owner: type[BaseModel],
    name: str,
    depth: int,
    shown: dict[type[BaseModel], tuple[str, type[BaseModel]]],
) -> Iterator[_Section]:
    """Yield a section and its subsections.

    shown: the section with each model's keys, and the model there: the same one, or one derived from it. Other choices
    of the same types refer to it.
    """
    models = models_in(owner.model_fields[name].annotation)
    if len(models) > 1 and all(model in shown for model in models):
        section, _ = shown[models[0]]
        missing = {field for model in models for field in shown[model][1].model_fields} - {
            field for model in models for field in model.model_fields
        }
        without = f", without {', '.join(f'`{field}`' for field in sorted(missing))}" if missing else ""
        tags = ", ".join(map(_tag, models))
        meaning = f"{meaning_of(owner, name)} The types of `{section}`{without}: {tags}."
        yield _Section(key, depth, meaning.strip(), ())
        return
    for model in models:
        shown.setdefault(model, (key, model))
    if models:
        advice = tuple((_tag(model), model.take) for model in models if hasattr(model, "take"))
        yield _Section(key, depth, meaning_of(owner, name), tuple(_tables(models)), advice)
    inner: dict[str, tuple[type[BaseModel], str]] = {}
    for model in models:
        for field in model.model_fields:
            path, types = f"{key}.{field}", models_in(model.model_fields[field].annotation)
            if path not in inner or len(types) > len(models_in(inner[path][0].model_fields[field].annotation)):
                inner[path] = (model, field)
    for path, (model, field) in inner.items():
        yield from _section(path, model, field, depth + 1, shown)


def _tables(models: list[type[BaseModel]]) -> Iterator[_Table]:
    """Yield the keys that all types share, those that several types share, and the keys of each type."""
    first = models[0]
    if len(models) == 1:
        yield _Table("", "", _keys_of(first))
        return
    common = {name for name in first.model_fields if all(_is_same_field(name, first, model) for model in models)}
    yield _Table("", "", _keys_of(first, without=first.model_fields.keys() - common))
    shared: dict[str, type[BaseModel]] = {}
    for model in models:
        for name in model.model_fields.keys() - common - shared.keys():
            if sum(_is_same_field(name, model, other) for other in models) >= _MANY:
                shared[name] = model
    if shared:
        keys = [key for model in models for key in _keys_of(model) if shared.get(key.name) is model]
        yield _Table("", "Keys of several types:", tuple(keys))
    for model in models:
        names = [name for name in model.model_fields if name in shared and _is_same_field(name, shared[name], model)]
        also = f" Also: {', '.join(f'`{name}`' for name in names)}." if names else ""
        meaning = " ".join(map(_in_one_line, _meanings_of(model))) + also
        yield _Table(_tag(model), meaning, _keys_of(model, without={"type", *common, *names}))


def _meanings_of(model: type[BaseModel]) -> list[str]:
    """Return the docstrings of the same type of settings that a model derives from, or its own."""
    kinds = [kind for kind in model.__mro__[1:] if issubclass(kind, BaseModel) and "type" in kind.model_fields]
    bases = [kind for kind in kinds if _tag(kind) == _tag(model)]
    return [kind.__doc__ for kind in reversed(bases) if kind.__doc__] or [model.__doc__ or ""]


def _keys_of(model: type[BaseModel], without: Any = ()) -> tuple[_Key, ...]:
    """Return the keys of one type of settings."""
    fields = {name: field for name, field in model.model_fields.items() if name not in without}
    return tuple(
        _Key(name, _type_of(field), _default_of(field), meaning_of(model, name)) for name, field in fields.items()
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
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(list(value)) if isinstance(value, tuple) else str(value)


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    for file, content in schemas(configs_dir()).items():
        write_atomically(configs_dir() / SCHEMA_FOLDER / file, content.encode())
    print(page(), end="")
