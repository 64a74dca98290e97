"""The table of other trainers' settings."""

import re

import pytest

from nemo_opd.config.other_trainers import NAMES
from nemo_opd.config.run import RunConfig
from nemo_opd.config.settings import all_keys
from tests.composition import ROOT

PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
KEY = re.compile(r"\b[a-z]+(?:\.[a-z_0-9]+)+\b(?<!\.jsonl)")


def test_every_setting_of_the_table_is_one() -> None:
    """Bug: the table recommends a setting that was renamed."""
    keys = {key for names in NAMES.values() for here in names.values() for key in KEY.findall(here)}
    assert len(keys) > 40
    assert keys <= set(all_keys(RunConfig))


def test_no_word_of_another_trainer_is_a_key_here() -> None:
    """Bug: a key in the wrong section is explained as another trainer's, instead of by its section."""
    last_parts = {key.rpartition(".")[2] for key in all_keys(RunConfig)}
    assert not last_parts & {word for names in NAMES.values() for word in names}


@pytest.mark.parametrize("heading", ["## TRL", "## NeMo-RL"])
def test_settings_that_the_page_explains_are_in_the_table(heading: str) -> None:
    """Bug: a setting has a row on the page, but no error message explains it."""
    section = PAGE.partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    words = {word.rpartition(".")[2] for cell in first_cells for word in re.findall(r"`([\w.\[\]]*\w)", cell)}
    ours = {key.rpartition(".")[2] for key in all_keys(RunConfig)}
    assert len(words) > 15
    assert words - ours - {name for names in NAMES.values() for name in names} == set()
