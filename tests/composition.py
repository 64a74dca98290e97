"""What overrides and whole command lines configure, without a process of its own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import hydra
from hydra import initialize_config_dir

from nemo_opd.config import RunConfig
from nemo_opd.config.command_line import read_command_line
from nemo_opd.config.composition import composition_errors
from nemo_opd.config.load import from_omegaconf, run_with_hydra

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
DEMO = "off_policy_demo"
PRODUCTION = "off_policy_distillation"


@cache
def compose(*overrides: str, config_name: str = DEMO) -> RunConfig:
    """By Hydra's interface for this, in half the time of its command line; the demo without its benchmark."""
    if config_name == DEMO and not any(override.lstrip("+~").startswith("evaluation") for override in overrides):
        overrides = (*overrides, "evaluation=null")
    command = read_command_line(overrides, CONFIGS, config_name)
    with composition_errors(command), initialize_config_dir(str(CONFIGS), version_base="1.3"):
        found = hydra.compose(config_name, command.for_hydra)
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
