"""The run that a checkpoint belongs to, and its settings."""

from argparse import ArgumentParser
from pathlib import Path

import yaml

from nemo_opd.config.load import from_yaml
from nemo_opd.config.run import RunConfig
from nemo_opd.errors import CheckpointError

CONFIG = "config.yaml"


def add_config(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the run's settings (default: config.yaml in its directory)"
    )


def run_directory(checkpoint: Path) -> Path:
    return checkpoint.absolute().parent.parent


def read_config(given: Path | None, run: Path) -> RunConfig:
    """Return the settings. Raises CheckpointError where there are none, and ConfigError where they are not valid."""
    file = given or run / CONFIG
    if not file.is_file():
        key = "--config" if given is None else f"--config={given}"
        raise CheckpointError(
            f"{key}: there is no {file}; give the run's settings as a file, which its own command writes with "
            "`--cfg job --resolve > FILE`"
        )
    try:
        return from_yaml(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file} cannot be read ({reason}); give another file as --config") from error


def averages(config: RunConfig) -> dict[str, str]:
    """Return the names in checkpoints of the averages of the student's weights, by the teacher's name."""
    return {each.name: str(i) for i, each in enumerate(config.active_teachers) if each.weights == "ema"}


def average_of(config: RunConfig, teacher: str) -> str:
    """Return the name in checkpoints of a teacher's average. Raises CheckpointError where the teacher is none."""
    if (found := averages(config).get(teacher)) is None:
        there = ", ".join(averages(config))
        known = f"those of the run are {there}; name one of them" if there else "the run has none; leave it out"
        raise CheckpointError(f"--average={teacher}: this is no teacher with weights: ema; {known}")
    return found
