"""Tables keyed by a choice of the settings: a missing line is reported at import."""

import runpy
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal, Union, get_args

import pytest
from pydantic import Field

from nemo_opd.config.data import Files, Source, source_of
from nemo_opd.config.settings import Settings
from nemo_opd.errors import ConfigError

PACKAGE = Path(__file__).parents[2] / "nemo_opd"


class Added(Settings):
    type: Literal["added"] = "added"


class SourceOfMore(Source):
    added_files: Files = ()


@pytest.mark.parametrize(
    ("settings", "name", "table", "file", "missing"),
    [
        ("loss", "LossTerm", "LOSSES", "losses/term_loss.py", "added"),
        ("loss", "DivergenceKind", "DIVERGENCES", "losses/divergence.py", "added"),
        ("objective", "Aggregation", "RULES", "aggregation/rules.py", "Added"),
        ("objective", "Score", "NATS", "aggregation/rules.py", "added"),
        ("rollout", "Rollouts", "ENGINES", "training/engines.py", "Added"),
        ("rollout", "Environment", "ENVIRONMENTS", "rollout/environment.py", "Added"),
        ("reward", "Reward", "REWARDS", "rewards/configured.py", "Added"),
        ("data", "Source", "READERS", "data/document_sources.py", "added_files"),
    ],
)
def test_a_forgotten_line_is_named(
    settings: str, name: str, table: str, file: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a KeyError during a run, or the wrong formula."""
    module = import_module(f"nemo_opd.config.{settings}")
    choice = getattr(module, name)
    if name == "Source":
        more: object = SourceOfMore
    elif missing == "added" and name != "LossTerm":
        more = Literal[(*get_args(choice), "added")]
    else:
        more = Annotated[Union[(*get_args(get_args(choice)[0]), Added)], Field(discriminator="type")]
    monkeypatch.setattr(module, name, more)

    where = PACKAGE / ("losses/term_loss.py" if table == "DIVERGENCES" else file)
    with pytest.raises(NotImplementedError, match=rf"^{table} in nemo_opd/{file} has no line for {missing}; add it"):
        runpy.run_path(str(where))


def test_a_kind_of_files_takes_one_path_as_it_is_declared() -> None:
    assert SourceOfMore(added_files="a.csv").added_files == ("a.csv",)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("texts/*.parquet", "parquet_files"),
        ("a.jsonl.gz", "jsonl_files"),
        ("a.txt", "text_files"),
        ("demo:train", "arrow_files"),
        ("a.json", "jsonl_files"),
        ("a", "jsonl_files"),
    ],
)
def test_a_files_kind_is_that_of_its_suffix(file: str, kind: str) -> None:
    """Bug: compressed files or a new kind are unknown."""
    assert source_of([file, file], key="--data", otherwise="jsonl_files").given == {kind: (file, file)}


def test_files_of_several_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--data: the files are of several kinds \(arrow_files, text_files\)"):
        source_of(["a.arrow", "b.txt"], key="--data", otherwise="jsonl_files")
