"""All settings with their meaning, from the models that check them.

`python -m nemo_opd.config.reference` prints docs/settings.md.
"""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hydra.core.config_store import ConfigStore
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.config.problems import models_in
from nemo_opd.config.run import RunConfig

_HELP = "settings"
WIDTH = 80
PAGE = "docs/settings.md"


def store_help(model: type[BaseModel], config_dir: Path, program: str) -> None:
    """Have `hydra/help=settings` print this instead of Hydra's own help."""
    text = help_text(model, config_dir, program)
    node = {"app_name": program, "header": "", "footer": "", "template": text}
    ConfigStore.instance().store(group="hydra/help", name=_HELP, node=node)


def help_text(model: type[BaseModel], config_dir: Path, program: str) -> str:
    """Return the text of `--help`: usage, options of groups, and the keys by section."""
    groups = {folder.name: options(folder) for folder in sorted(config_dir.iterdir()) if folder.is_dir()}
    sections = {name: ", ".join(keys(field)) for name, field in model.model_fields.items()}
    own = [name for name, inner in sections.items() if not inner]
    sections = {name: inner for name, inner in sections.items() if inner}
    if own:
        sections[""] = ", ".join(own)
    known = [name for name in groups if name in model.model_fields]
    return "\n".join(
        (
            f"{program} [--config FILE] [GROUP=OPTION …] [KEY=VALUE …]",
            "",
            "Options of a group, as GROUP=OPTION (a file in a folder of this name):",
            *(entry(f"{name}:", groups[name]) for name in known),
            "",
            "Settings, as SECTION.KEY=VALUE:",
            *(entry(f"{name}:" if name else "on their own:", inner) for name, inner in sections.items()),
            "",
            f"What each means, nested ones too: {PAGE}; how to use them: README.md.",
            "",
            "--config FILE      start from a file of your own",
            "--cfg job          print the settings and end",
            "--multirun KEY=1,2 a run with each value",
            "run.dry_run=true   check everything and end" if model is RunConfig else "",
        )
    ).rstrip()


def options(folder: Path) -> str:
    return ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))


def keys(field: FieldInfo) -> list[str]:
    """Return the keys of a section, of all its types."""
    return list(dict.fromkeys(name for model in models_in(field.annotation) for name in model.model_fields))


def entry(name: str, content: str) -> str:
    return textwrap.fill(
        f"{name:<13} {content}", WIDTH, initial_indent="  ", subsequent_indent=" " * 16, break_on_hyphens=False
    )


def page() -> str:
    """Write the Markdown page: a table a section, and one for each type of it that has more keys."""
    shown: dict[type[BaseModel], str] = {}
    return "\n".join(
        (
            "# Settings",
            "",
            "Made by `uv run python -m nemo_opd.config.reference` from the models in `nemo_opd/config/`. On the",
            "command line a setting is `section.key=value`, and one of a list's elements `teachers.0.key=value`.",
            *(line for name, field in RunConfig.model_fields.items() for line in section(name, field, shown)),
            "",
            "## evaluate.py",
            "",
            *table(EvaluationConfig, without=()),
            *section("evaluate.py: data", EvaluationConfig.model_fields["data"], shown, level=3),
            "",
        )
    )


def section(name: str, field: FieldInfo, shown: dict[type[BaseModel], str], level: int = 2) -> Iterator[str]:
    """Yield a section and those in it. shown: the section of each model that was written, to which others refer."""
    models = models_in(field.annotation)
    yield from ("", f"{'#' * level} {name}")
    if field.description:
        yield from ("", _in_one_line(field.description))
    if len(models) > 1 and all(model in shown for model in models):
        yield from ("", f"The types of `{shown[models[0]]}`: {', '.join(map(tag, models))}.")
        return
    for model in models:
        shown.setdefault(model, name)
    common = [key for key in models[0].model_fields if all(same(key, models[0], model) for model in models)]
    if len(models) == 1:
        yield from ("", *table(models[0], without=()))
    else:
        yield from ("", *table(models[0], without=[key for key in models[0].model_fields if key not in common]))
        for model in models:
            yield from ("", f"**`type: {tag(model)}`** {_in_one_line(model.__doc__ or '')}".rstrip(), "")
            yield from table(model, without=["type", *common])
    fields = [pair for model in models for pair in model.model_fields.items()]
    for key, own in {f"{name}.{key}": own for key, own in fields if models_in(own.annotation)}.items():
        yield from section(key, own, shown, level + 1)


def same(key: str, first: type[BaseModel], other: type[BaseModel]) -> bool:
    own, others = first.model_fields, other.model_fields
    return key != "type" and key in others and repr(own[key]) == repr(others[key])


def tag(model: type[BaseModel]) -> str:
    field = model.model_fields.get("type")
    return ", ".join(map(str, get_args(field.annotation))) if field else model.__name__


def table(model: type[BaseModel], without: Any) -> Iterator[str]:
    rows = {name: field for name, field in model.model_fields.items() if name not in without}
    if not rows:
        return
    yield from ("| key | type | default | meaning |", "|---|---|---|---|")
    for name, field in rows.items():
        cells = (f"`{name}`", type_of(field), _default_of(field), _in_one_line(field.description or ""))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def type_of(field: FieldInfo) -> str:
    return "see its section" if models_in(field.annotation) else f"`{_type_name(field.annotation)}`"


def _type_name(annotation: Any) -> str:
    """Format a type as people write it, without bounds: `int | null`, `list[float]`, `auto | cpu`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " | ".join(str(each).lower() if isinstance(each, bool) else str(each) for each in arguments)
    if origin in (Union, UnionType):
        return " | ".join(map(_type_name, arguments))
    if origin is tuple:
        return f"list[{', '.join(dict.fromkeys(_type_name(each) for each in arguments if each is not ...))}]"
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
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{shown}`"


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    print(page(), end="")
