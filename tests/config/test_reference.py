"""Catches an outdated settings page, and keys without an entry."""

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.config.reference import PAGE, help_text, meaning_of, page
from nemo_opd.config.run import RunConfig
from nemo_opd.config.settings import models_in
from tests.composition import CONFIGS, ROOT


def all_keys(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        for inner in models_in(field.annotation):
            yield from all_keys(inner)


def test_the_page_is_that_of_the_settings() -> None:
    assert (ROOT / PAGE).read_text() == page(), f"run `uv run python -m nemo_opd.config.reference > {PAGE}`"


@pytest.mark.parametrize("model", [RunConfig, EvaluationConfig])
def test_every_key_is_on_the_page(model: type[BaseModel]) -> None:
    text = page()
    sections = set(RunConfig.model_fields)
    headings = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith("##")}
    missing = [key for key in all_keys(model) if key not in sections | headings and f"* `{key}`" not in text]
    assert set(missing) <= {"type"}


@pytest.mark.parametrize("model", [RunConfig, EvaluationConfig])
def test_help_fits_a_terminal_and_names_every_section(model: type[BaseModel]) -> None:
    lines = help_text(model, CONFIGS, "distil").splitlines()
    assert max(map(len, lines)) <= 80
    assert set(model.model_fields) <= {word.strip(":,") for line in lines for word in line.split()}


def every_model(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for inner in models_in(field.annotation):
            yield from every_model(inner)


MODELS = sorted({*every_model(RunConfig), *every_model(EvaluationConfig)}, key=lambda model: model.__name__)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_field_and_every_type_has_a_meaning(model: type[BaseModel]) -> None:
    """Bug: a section or a type without an explanation on the page and in editors."""
    assert "__doc__" in vars(model), f"write a docstring for {model.__name__}"
    assert model.__doc__
    assert [name for name in model.model_fields if not meaning_of(model, name)] == [], "write a docstring below it"
