"""Settings of the run that a checkpoint belongs to."""

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


def read_config(path: Path | None, run: Path) -> RunConfig:
    """Read the settings in `path`, by default the run's. Raises CheckpointError if missing, ConfigError if invalid."""
    file = path or run / CONFIG
    if not file.is_file():
        key = "--config" if path is None else f"--config={path}"
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
    """Return the names that the student's averages have in checkpoints, by the teacher's name."""
    return {teacher.name: str(i) for i, teacher in enumerate(config.active_teachers) if teacher.weights == "ema"}


def average_of(config: RunConfig, teacher: str) -> str:
    """Return the name that a teacher's average has in checkpoints. Raises CheckpointError if it has no average."""
    if (average := averages(config).get(teacher)) is None:
        names = ", ".join(averages(config))
        way_out = f"the run has {names}; name one of them" if names else "the run has none; leave it out"
        raise CheckpointError(f"--average={teacher}: not a teacher with weights: ema; {way_out}")
    return average
