"""The text of `--help`: every setting with its type, default and meaning."""

import difflib
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel

from nemo_opd.config.described import Key, Section, Table, keys_of, sections
from nemo_opd.config.options import groups, options, recipes
from nemo_opd.config.problems import models_in
from nemo_opd.config.run import RunConfig
from nemo_opd.errors import ConfigError

_WIDTH = 80


def help_text(model: type[BaseModel], config_dir: Path, program: str, only: Sequence[str] = ()) -> str:
    """Return usage, group options and all settings, or only the settings of the sections `only`.

    Raises ConfigError for an unknown section.
    """
    all_sections = list(sections(model))
    if only:
        return "\n".join(line for name in only for line in _with_subsections(name, all_sections))
    usage = _usage(model, config_dir, program, all_sections)
    return "\n".join((*usage, *(line for section in all_sections for line in _section(section))))


def _with_subsections(name: str, all_sections: Sequence[Section]) -> Iterator[str]:
    matches = [section for section in all_sections if section.name == name or section.name.startswith(f"{name}.")]
    if not matches:
        close = difflib.get_close_matches(name, [section.name for section in all_sections], n=1)
        top_level = ", ".join(section.name for section in all_sections if not section.depth)
        way_out = f"did you mean {close[0]}?" if close else f"choose one of {top_level}"
        raise ConfigError(f"--help {name}: there is no such section; {way_out}")
    for section in matches:
        yield from _section(section)


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
    yield from _table("", Table("", "", single))


def _section(section: Section) -> Iterator[str]:
    yield from ("", *_wrapped(f"{section.name}: {section.meaning}", 0))
    prefix = section.name.replace("teachers", "teachers.0", 1) if section.name.startswith("teachers") else section.name
    for table in section.tables:
        if table.tag:
            yield from ("", *_wrapped(f"{section.name} of type={table.tag}: {table.meaning}", 0))
        yield from _table(f"{prefix}.", table)


def _table(prefix: str, table: Table) -> Iterator[str]:
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
