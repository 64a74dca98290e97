"""What overrides and whole command lines configure, without a process of its own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from nemo_opd.config import RunConfig
from nemo_opd.config.load import compose_settings, run_with_hydra

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
DEMO = "off_policy_demo"
PRODUCTION = "off_policy_distillation"


@cache
def compose(*overrides: str, config_name: str = DEMO) -> RunConfig:
    """By Hydra's interface for this, in half the time of its command line; the demo without its benchmark."""
    if config_name == DEMO and not any(override.lstrip("+~").startswith("evaluation") for override in overrides):
        overrides = (*overrides, "evaluation=null")
    return compose_settings(overrides, RunConfig, CONFIGS, config_name)


def configured(*arguments: str, config_name: str = DEMO) -> RunConfig:
    """By a whole command line."""
    (config,) = compose_all(*arguments, config_name=config_name)
    return config


def compose_all(*arguments: str, config_name: str = DEMO) -> list[RunConfig]:
    """The configuration of every job: several with --multirun, none with --help."""
    jobs: list[RunConfig] = []
    with command_line(arguments):
        run_with_hydra(jobs.append, RunConfig, config_dir=CONFIGS, config_name=config_name)
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
