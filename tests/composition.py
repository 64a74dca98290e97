"""What overrides and whole command lines configure, without a process of its own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import hydra
from hydra import initialize_config_dir

from nemo_opd.config import RunConfig
from nemo_opd.config.load import composition_errors, from_omegaconf, hydra_arguments, run_with_hydra

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
DEMO = "off_policy_demo"
PRODUCTION = "off_policy_distillation"


@cache
def compose(*overrides: str, config_name: str = DEMO) -> RunConfig:
    """By Hydra's interface for this, in half the time of its command line."""
    with composition_errors(overrides), initialize_config_dir(str(CONFIGS), version_base="1.3"):
        found = hydra.compose(config_name, hydra_arguments(overrides, CONFIGS))
    return from_omegaconf(found, RunConfig)


def configured(*arguments: str, config_name: str = DEMO) -> RunConfig:
    """By a whole command line."""
    (config,) = compose_all(*arguments, config_name=config_name)
    return config


def compose_all(*arguments: str, config_name: str = DEMO) -> list[RunConfig]:
    """The configuration of every job: several with --multirun, none with --help."""
    jobs: list[RunConfig] = []
    with command_line(arguments):
        run_with_hydra(jobs.append, config_dir=CONFIGS, config_name=config_name)
    return jobs


@contextmanager
def command_line(arguments: tuple[str, ...]) -> Iterator[None]:
    previous, sys.argv = sys.argv, ["distil", *arguments]
    try:
        yield
    finally:
        sys.argv = previous


@contextmanager
def nothing_is_created(folder: Path) -> Iterator[None]:
    before = sorted(folder.rglob("*"))
    yield
    assert sorted(folder.rglob("*")) == before
