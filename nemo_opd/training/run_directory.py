"""The directory of a run, and what of a run it holds already."""

import os
import tempfile
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from nemo_opd.checkpoint.identity import newest_of_same_run
from nemo_opd.checkpoint.manager import CheckpointManager, Found
from nemo_opd.config.run import RunConfig
from nemo_opd.config.run_fields import Run
from nemo_opd.disk import existing
from nemo_opd.errors import ConfigError


def resolve_output_dir(run: Run) -> Path:
    """The run's directory, not yet created. Raises ConfigError where it cannot be written."""
    folder = run.output_dir or default_output_dir(run.name)
    place = existing(folder)
    try:
        with suppress(FileNotFoundError):
            folder.stat()
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise ConfigError(
            f"run.output_dir={folder}: {place} is not writable ({reason}); name another directory, or change its "
            "permissions"
        ) from error
    return folder


def checkpoints_of(config: RunConfig, output_dir: Path) -> CheckpointManager:
    return CheckpointManager(output_dir / "checkpoints", config.train.keep_last)


def progress_to_resume(config: RunConfig, output_dir: Path, *, hashed: bool = True) -> Found | None:
    """Where the run continues; None where it starts anew.

    hashed: as for `CheckpointManager.newest`. Raises ConfigError where the directory holds a run that is not
    to be continued, and CheckpointError where it is to be continued and cannot be.
    """
    checkpoints = checkpoints_of(config, output_dir)
    if config.run.resume == "auto":
        return newest_of_same_run(checkpoints, config, hashed=hashed)
    if steps := checkpoints.steps():
        raise ConfigError(
            f"run.output_dir={output_dir} holds a run with a checkpoint at step {steps[-1]}; write run.resume=auto to "
            "continue it, or another run.output_dir"
        )
    return None


def require_not_beyond(step: int, total_steps: int, output_dir: Path) -> None:
    """Raise ConfigError where a run is continued that has made more steps than it is to have."""
    if step > total_steps:
        raise ConfigError(
            f"run.output_dir={output_dir} is at step {step} and this run ends at {total_steps}; raise train.max_steps "
            "or train.epochs to continue it, or start anew with another run.output_dir"
        )


def default_output_dir(name: str) -> Path:
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path("outputs") / name / stamp
    for number in range(1, 1000):
        if not folder.exists():
            break
        folder = folder.with_name(f"{stamp}_{number}")
    return folder
