"""JSON schemas of recipes and of config groups, for editors that complete and check YAML."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel

from nemo_opd.config.base import groups, models_in, options
from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.config.run import RunConfig
from nemo_opd.files import write_atomically

FOLDER = "schema"
"""Folder of the schemas, next to the groups."""
_DIALECT = "http://json-schema.org/draft-07/schema#"
_REFERENCE = "Reference"


def write_schemas(config_dir: Path) -> None:
    """Write the schemas as files."""
    for name, content in schemas(config_dir).items():
        write_atomically(config_dir / FOLDER / name, content.encode())


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
    """Return the schema of a recipe: a model's settings, all optional as groups may set them, and Hydra's own keys."""
    schema = _partial(model.model_json_schema(ref_template="#/definitions/{model}"))
    definitions = schema.pop("$defs")
    definitions[_REFERENCE] = {
        "type": "string",
        "pattern": r"^\$\{",
        "description": "A reference, such as ${oc.env:NAME}.",
    }
    choices = {
        group: {"anyOf": [{"enum": options(config_dir, group)}, {"type": ["string", "null"]}]}
        for group in groups(config_dir, model)
    }
    override = {f"override {group}": choice for group, choice in choices.items()}
    entry = {"anyOf": [{"type": "string"}, {"type": "object", "properties": choices | override}]}
    definitions["Defaults"] = {"type": "array", "items": entry}
    about = "An option of each group; `_self_` stands for this file."
    defaults = {"$ref": "#/definitions/Defaults", "description": about}
    schema["properties"] |= {"defaults": defaults, "hydra": {"type": "object", "description": "Settings of Hydra."}}
    for group in choices:  # an option may build on another
        for inner in models_in(model.model_fields[group].annotation):
            definitions[inner.__name__]["properties"]["defaults"] = defaults
    return {"$schema": _DIALECT, **schema, "definitions": definitions}


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
    plain = {_RENAMED.get(key, key): value for key, value in schema.items() if key not in _WITHOUT}
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


_WITHOUT = frozenset({"required", "discriminator", "title"})
_RENAMED = {"oneOf": "anyOf", "prefixItems": "items"}
"""`items` is the name of `prefixItems` in the dialect that editors support."""


def _value_or_reference(field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field's value or of a reference to one."""
    about = {key: field.pop(key) for key in ("description", "default") if key in field}
    choices = field["anyOf"] if set(field) == {"anyOf"} else [field]
    single = [choice["items"] for choice in choices if isinstance(choice.get("items"), Mapping)]
    is_text = any(
        choice.get("type") == "string" and not set(choice) & {"enum", "const", "pattern"} for choice in choices
    )
    reference = [] if is_text else [{"$ref": f"#/definitions/{_REFERENCE}"}]
    nothing = [{"type": "null"}] if single and about.get("default") == [] else []
    return about | {"anyOf": [*choices, *single, *nothing, *reference]}
