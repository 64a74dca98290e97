"""Converts a Hugging Face folder to the first checkpoint of a run, in one process and without a GPU."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from nemo_opd.checkpoint.identity import identity
from nemo_opd.checkpoint.manager import CheckpointManager, Progress
from nemo_opd.cli.checkpoint.run_settings import CONFIG, add_config, averages, read_config, run_directory
from nemo_opd.cli.command import Command
from nemo_opd.config.load import to_yaml
from nemo_opd.config.parallelism import Parallelism
from nemo_opd.config.run import RunConfig
from nemo_opd.errors import CheckpointError
from nemo_opd.files import write_atomically

if TYPE_CHECKING:
    from nemo_opd.training.corpus import Corpus
    from nemo_opd.training.prompts import Prompts

_CHECKPOINTS = "checkpoints"
FIRST = "step_000000"
EPILOG = """\
Optimizer and data are at their start: a run that continues from the checkpoint starts with these weights instead of
student.model's. If the run trains adapters (student.lora), the folder must be peft's. The model is held in memory once,
in fp32.

example:
  nemo-opd distil train.max_steps=200 --cfg job --resolve > run.yaml
  nemo-opd checkpoint from-hf --model WEIGHTS --output RUN/checkpoints/step_000000 --config run.yaml
  nemo-opd distil train.max_steps=200 run.output_dir=RUN run.resume=auto
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="MODEL", help="folder or hub name of the weights")
    parser.add_argument("--output", required=True, type=Path, metavar="FOLDER", help=f"RUN/checkpoints/{FIRST}")
    add_config(parser)


def convert(arguments: Namespace, console: Console) -> None:
    """Write the checkpoint. Raises an OPDError; nothing is written then."""
    from nemo_opd.checkpoint.convert import other_settings, save_start, trained_part, weights_to_start_from
    from nemo_opd.workers.optimizer import build_optimizer, build_scheduler

    output = arguments.output
    checkpoints = CheckpointManager(output.parent, keep_last=1)
    _require_first(output, checkpoints)
    run = run_directory(output)
    config = read_config(arguments.config, run)
    _require_zeros_at_first(config)
    model = trained_part(config.student)
    data = _read_data(config)
    weights = weights_to_start_from(arguments.model, config.student, model)
    total_steps = config.train.max_steps or sum(data.steps(config))
    progress = Progress(step=0, loader=data.start(config), settings=identity(config))
    with checkpoints.writing(progress) as folder:
        save_start(
            folder,
            weights,
            model,
            partial(build_optimizer, config.student.optimizer),
            lambda optimizer: build_scheduler(config.student.scheduler, optimizer, total_steps),
            averages=list(averages(config).values()),
        )
    if not (run / CONFIG).exists():
        write_atomically(run / CONFIG, to_yaml(config).encode())
    message = f"wrote {output}: {len(weights):,} weights; start with run.output_dir={run} run.resume=auto"
    if config.student.lora is None and (differing := other_settings(arguments.model, config.student)):
        settings = "; ".join(f"{key}={used!r}, there {stored!r}" for key, (stored, used) in differing.items())
        message += f"\nwarning: the run uses student.model's configuration, which differs: {settings}"
    print(message)


def _require_zeros_at_first(config: RunConfig) -> None:
    """Raise CheckpointError for an optimizer whose initial state may not be zeros."""
    if (kind := config.student.optimizer.type) in ("adamw_8bit", "class"):
        raise CheckpointError(
            f"student.optimizer.type={kind}: its state before the first step is not known; start a run with the "
            "weights as student.model"
        )


def _require_first(output: Path, checkpoints: CheckpointManager) -> None:
    """Raise CheckpointError if a run in that directory would not continue from `output`."""
    if output.name != FIRST or output.absolute().parent.name != _CHECKPOINTS:
        raise CheckpointError(
            f"--output={output}: a run finds its checkpoints by name, and this checkpoint precedes the first step; "
            f"name it RUN/{_CHECKPOINTS}/{FIRST}, with RUN as run.output_dir"
        )
    from nemo_opd.checkpoint.convert import require_unused

    require_unused(output)
    if later := [step for step in checkpoints.steps() if step]:
        raise CheckpointError(
            f"--output={output}: the run already has a checkpoint of step {later[-1]:,} and would continue from it; "
            "name another run directory"
        )


def _read_data(config: RunConfig) -> Corpus | Prompts:
    """Return the run's documents or prompts. Raises the errors of reading its tokenizers and its data."""
    from nemo_opd.training.corpus import load_corpus
    from nemo_opd.training.model_info import read_model_info
    from nemo_opd.training.prompts import load_prompts

    # The parallel layout does not affect the data, and its devices may be missing here.
    unsharded = {"parallelism": Parallelism()}
    student = read_model_info(config.student.model_copy(update=unsharded), "student", "cpu")
    teachers = [
        read_model_info(teacher.model_copy(update=unsharded), f"teachers.{i}", "cpu")
        for i, teacher in enumerate(config.active_teachers)
    ]
    return (load_corpus if config.rollout is None else load_prompts)(config, student, teachers)


COMMAND = Command(__doc__, EPILOG, add_arguments, convert)
