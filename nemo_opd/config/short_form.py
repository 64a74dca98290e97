"""Short forms of a run's settings: a string in place of a section, and a teacher's type and name left out."""

import re
from collections.abc import Callable, Mapping
from glob import has_magic
from pathlib import Path
from typing import Any, TypeGuard

from nemo_opd.config.data import Source, source_kind
from nemo_opd.config.run_fields import RunFields
from nemo_opd.config.settings import options
from nemo_opd.errors import ConfigError
from nemo_opd.files import load_yaml
from nemo_opd.paths import configs_dir

TYPED = ("loss", "aggregation", "handoff", "rollout", "reward", "environment")
"""Sections that a string names by their type, or by an option of their group."""
SHORT = ("student", "teachers", "data", *TYPED)
"""Sections that a string can stand for."""
SOURCES = ("data.train", "data.validation", "evaluation.data", "evaluation.sets.*.data", "sets.*.data")
"""Sections within others that files, or a data set on the hub, can stand for; * is any name."""
REWARDS = ("evaluation.sets.*.reward", "sets.*.reward")
"""Sections within others that a type can stand for."""
_UNUSUAL_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")


def sections_of_strings(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings with a section in place of each string that stands for one.

    student: a model. teachers: models. data and `SOURCES`: files, or a data set on the hub. Other sections: an option
    of the group, as on the command line, or a type. Raises ConfigError for files of several kinds.
    """
    sections = dict(data)
    for key in TYPED:
        if is_text(name := sections.get(key)):
            sections[key] = _option(key, name)
    if is_text(model := sections.get("student")):
        sections["student"] = {"model": model}
    if is_text(model := sections.get("teachers")):
        sections["teachers"] = [model]
    if isinstance(teachers := sections.get("teachers"), list):
        sections["teachers"] = [_section_of_teacher(teacher) for teacher in teachers]
    if isinstance(texts := sections.get("data"), str | list):
        sections["data"] = {"train": texts}
    for source in SOURCES:
        sections = _replaced(sections, source, _source)
    for reward in REWARDS:
        sections = _replaced(sections, reward, lambda _, name: {"type": name} if is_text(name) else name)
    return sections


def _replaced(section: Any, path: str, replace: Callable[[str, Any], Any], key: str = "") -> Any:
    """Return a section with the values at a path in it replaced. key: the section's key, ending in a dot."""
    name, _, inner_path = path.partition(".")
    if not isinstance(section, Mapping) or (name != "*" and name not in section):
        return section
    replaced = {
        inner: _replaced(section[inner], inner_path, replace, f"{key}{inner}.")
        if inner_path
        else replace(f"{key}{inner}", section[inner])
        for inner in (section if name == "*" else [name])
    }
    return {**section, **replaced}


def short_form(group: str, value: str) -> object:
    """Return the section that a string on the command line stands for; the string if it names a file of the group.

    A model or a file has a slash, a colon or a dot in its name, or exists.
    """
    is_name = group in ("student", "teachers", "data") and (re.search("[/:.]", value) or Path(value).exists())
    return sections_of_strings({group: value})[group] if is_name else value


def long_form(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings without short forms: also with types left out, and the names of teachers.

    A section that is of one type by default, such as `loss`, gets this type, and a teacher that is loaded type auto,
    which preflight resolves. A teacher's name is the last part of its model's.
    """
    sections = sections_of_strings(data)
    for key in TYPED:
        default = RunFields.model_fields[key].get_default(call_default_factory=True)
        if isinstance(section := sections.get(key), Mapping) and default is not None:
            sections[key] = {"type": default.type, **section}
    if not isinstance(teachers := sections.get("teachers"), list):
        return sections
    names = {"student", *(str(teacher.get("name")) for teacher in teachers if isinstance(teacher, Mapping))}
    sections["teachers"] = [_with_type_and_name(teacher, names) for teacher in teachers]
    return sections


def is_text(value: Any) -> TypeGuard[str]:
    """Return whether a value is a text, and not a reference, which is read when its value is known."""
    return isinstance(value, str) and not value.startswith("${")


def _option(group: str, name: str) -> Any:
    """Return the settings of an option of a group; the section with this type if there is no such option."""
    if name not in options(configs_dir(), group):
        return {"type": name}
    return load_yaml((configs_dir() / group / f"{name}.yaml").read_text(encoding="utf-8"))


def _section_of_teacher(teacher: Any) -> Any:
    if isinstance(teacher, str):
        return {"model": teacher}
    if isinstance(teacher, Mapping) and isinstance(teacher.get("loss"), str):
        return {**teacher, "loss": {"type": teacher["loss"]}}  # options of `loss` also have weights of the objective
    return teacher


def _source(key: str, texts: Any) -> Any:
    """Return the source of texts that a string or a list of strings names; anything else as it is."""
    names = [texts] if isinstance(texts, str) else texts
    if not isinstance(names, list) or not names or not all(is_text(name) and name.strip() for name in names):
        return texts
    kinds = {source_kind(name) for name in names}
    if len(kinds) > 1 or (None in kinds and len(names) > 1):
        raise ConfigError(f"{key}: {', '.join(names)} are not files of one kind; name files of one kind")
    kind = kinds.pop()
    if kind is None and (has_magic(names[0]) or Path(names[0]).is_file()):
        if Path(names[0]).suffix in (".csv", ".tsv"):
            raise ConfigError(
                f"{key}={names[0]}: tables of text are not read; convert the file to JSON lines or Parquet"
            )
        forms = ", ".join(f"{key}.{name}={names[0]}" for name in Source.model_fields if name.endswith("_files"))
        raise ConfigError(f"{key}={names[0]}: its suffix does not tell its kind; write one of {forms}")
    if kind is None and names[0].startswith(("/", "./", "../")) and not Path(names[0]).exists():
        raise ConfigError(f"{key}={names[0]}: there is no such file or folder; check the path")
    source = {"hub": {"path": names[0]}} if kind is None else {kind: names}
    return dict.fromkeys(Source.model_fields) | source  # replaces a source of another kind when merged


def _with_type_and_name(teacher: Any, names: set[Any]) -> Any:
    """Return a teacher with its type and name; adds the name to `names`."""
    if not isinstance(teacher, Mapping):
        return teacher
    section = dict(teacher)
    is_student = section.get("weights") in ("student", "ema")
    if "type" not in section:
        loaded = "same_tokenizer" if is_student else "auto"
        is_cached = section.get("cache") is not None and section.get("model") is None
        section["type"] = "served" if "urls" in section else "cached" if is_cached else loaded
    if "name" not in section:
        source = section.get("model") or section.get("cache") or section.get("weights")
        last_part = re.split("[/:]", str(source or "teacher").rstrip("/"))[-1]
        base = _UNUSUAL_IN_NAMES.sub("_", last_part) or "teacher"
        candidates = (base if i == 1 else f"{base}_{i}" for i in range(1, len(names) + 2))
        section["name"] = next(name for name in candidates if name not in names)
        names.add(section["name"])
    return section
