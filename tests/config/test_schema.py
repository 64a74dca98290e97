"""Catches outdated schemas, and schemas that refuse valid configs or accept invalid ones."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from omegaconf import OmegaConf

from nemo_opd.config.reference import SCHEMA_FOLDER, schemas
from tests.composition import CONFIGS

YAMLS = sorted(CONFIGS.rglob("*.yaml"))
MODELINE = re.compile(r"^# yaml-language-server: \$schema=(\S+)$", re.MULTILINE)


@cache
def parsed_schemas() -> dict[str, Any]:
    return {name: json.loads(text) for name, text in schemas(CONFIGS).items()}


def refusals(schema: str, content: Any) -> list[str]:
    by_name = parsed_schemas()

    def with_files(node: Any) -> Any:
        """Resolve a reference to another file of the folder, as editors do."""
        if isinstance(node, dict) and str(node.get("$ref", "")).startswith("run.json#"):
            return by_name["run.json"]["properties"][node["$ref"].rpartition("/")[2]]
        return node

    owner = by_name["run.json"] if schema not in ("run.json", "evaluation.json") else by_name[schema]
    root = with_files(by_name[schema]) | {"definitions": owner["definitions"]}
    return [error.message for error in jsonschema.Draft7Validator(root).iter_errors(content)]


def test_the_files_are_those_of_the_settings() -> None:
    written = {file.name: file.read_text(encoding="utf-8") for file in (CONFIGS / SCHEMA_FOLDER).glob("*.json")}
    assert written == schemas(CONFIGS), "run `uv run python -m nemo_opd.config.reference > docs/settings.md`"


@pytest.mark.parametrize("file", YAMLS, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_every_yaml_names_a_schema_that_it_fits(file: Path) -> None:
    (named,) = MODELINE.findall(file.read_text(encoding="utf-8"))
    schema = (file.parent / named).resolve()
    assert schema.parent == CONFIGS / SCHEMA_FOLDER
    assert refusals(schema.name, OmegaConf.to_container(OmegaConf.load(file))) == []


@pytest.mark.parametrize(
    ("schema", "content"),
    [
        ("run.json", {"train": {"max_step": 3}}),
        ("run.json", {"train": {"max_steps": 0}}),
        ("run.json", {"train": {"max_steps": "three"}}),
        ("run.json", {"trian": {}}),
        ("run.json", {"teachers": [{"name": "a", "type": "other"}]}),
        ("loss.json", {"type": "p_kl", "divergence": "kl"}),
        ("evaluation.json", {"n": 0}),
    ],
)
def test_mistakes_are_refused(schema: str, content: dict[str, Any]) -> None:
    assert refusals(schema, content)


@pytest.mark.parametrize(
    ("schema", "content"),
    [
        ("run.json", {"train": {"max_steps": "${oc.env:STEPS}"}, "data": {"train": {"arrow_files": "a.arrow"}}}),
        ("run.json", {"defaults": [{"loss": "p_kl"}, {"override teachers": "my_own"}, "_self_"]}),
        ("run.json", {"rollout": {"n": 3}, "loss": {"temperature": 2}}),
        ("run.json", {"student": {"lora": None}}),
    ],
)
def test_parts_and_references_are_accepted(schema: str, content: dict[str, Any]) -> None:
    """Bug: a recipe is marked as wrong if a key comes from its group or from the environment."""
    assert refusals(schema, content) == []


def test_completion_has_meanings() -> None:
    """Bug: an editor shows names without their meanings."""
    by_name = parsed_schemas()
    definitions = by_name["run.json"]["definitions"] | by_name["evaluation.json"]["definitions"]
    without = [
        f"{name}.{key}"
        for name, model in definitions.items()
        for key, field in model.get("properties", {}).items()
        if not field.get("description")
    ]
    assert without == []
