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
        raise CheckpointError(f"{file} cannot be read ({error}); give another file as --config") from error
