#!/usr/bin/env python
"""Converts between a run's sharded checkpoints and Hugging Face folders, in one process and without a GPU."""

import sys

# A script's folder comes first on its path; what it imports is named from the root.
if sys.path[0] == __file__.rpartition("/")[0]:
    sys.path[0] = __file__.rpartition("/tools/")[0]

import argparse
from functools import partial
from pathlib import Path

import torch
import yaml

from nemo_opd.checkpoint.convert import (
    other_settings,
    read_whole_checkpoint,
    require_same_adapters,
    require_unused,
    save_start,
    to_hugging_face,
    trained_part,
    weights_to_start_from,
)
from nemo_opd.checkpoint.identity import identity
from nemo_opd.checkpoint.manager import CheckpointManager, Progress
from nemo_opd.config.load import from_yaml, to_yaml
from nemo_opd.config.parallelism import Parallelism
from nemo_opd.config.run import RunConfig
from nemo_opd.errors import CheckpointError, OPDError
from nemo_opd.files import write_atomically
from nemo_opd.progress import quiet_libraries
from nemo_opd.training.cli import busy
from nemo_opd.training.corpus import Corpus, load_corpus
from nemo_opd.training.model_info import read_model_info
from nemo_opd.training.prompts import Prompts, load_prompts
from nemo_opd.workers.optimizer import build_optimizer, build_scheduler

DTYPES = ("float32", "bfloat16", "float16")
CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
FIRST = "step_000000"
EPILOG = """\
A checkpoint's `state` has the student's weights in fp32, cut over the ranks of the run. to-hf puts them together for
AutoModelForCausalLM.from_pretrained, as the run does itself in the checkpoint's `student`; in another precision with
--dtype; with --average the moving average that a teacher computes with. from-hf makes of weights the first checkpoint
of a run, with the optimizer and the data at their beginning: a run that continues from it starts with these weights in
place of those of student.model.

Where a run learns adapters (student.lora), to-hf writes what student.lora.export says, and from-hf reads a folder for
peft. Memory: to-hf holds the model once in the precision that it writes, from-hf once in fp32.

examples:
  uv run tools/convert_checkpoint.py to-hf --checkpoint RUN/checkpoints/step_000100 --output student_fp32 \\
      --dtype float32

  uv run examples/run_off_policy_distillation.py train.max_steps=200 --cfg job --resolve > run.yaml
  uv run tools/convert_checkpoint.py from-hf --model WEIGHTS --output RUN/checkpoints/step_000000 --config run.yaml
  uv run examples/run_off_policy_distillation.py train.max_steps=200 run.output_dir=RUN run.resume=auto
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="direction", required=True, metavar="DIRECTION")
    there = commands.add_parser("to-hf", help="a checkpoint becomes a Hugging Face folder")
    there.add_argument(
        "--checkpoint", required=True, type=Path, metavar="FOLDER", help="such as RUN/checkpoints/step_000100"
    )
    there.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="a new folder, or an empty one")
    there.add_argument("--average", metavar="NAME", help="write the average of the teacher NAME, of weights: ema")
    there.add_argument("--dtype", choices=DTYPES, help="of the weights written (default: that of student.model)")
    back = commands.add_parser("from-hf", help="a Hugging Face folder becomes the first checkpoint of a run")
    back.add_argument("--model", required=True, metavar="MODEL", help="folder or hub name of the weights")
    back.add_argument("--output", required=True, type=Path, metavar="FOLDER", help=f"RUN/checkpoints/{FIRST}")
    for each in (there, back):
        each.add_argument(
            "--config", type=Path, metavar="FILE", help="the run's settings (default: config.yaml in its directory)"
        )
    return parser.parse_args(arguments)


def convert(arguments: argparse.Namespace) -> str:
    """Says what was written. Raises an OPDError; nothing is written then."""
    return (to_hf if arguments.direction == "to-hf" else from_hf)(arguments)


def to_hf(arguments: argparse.Namespace) -> str:
    checkpoint, output, dtype = arguments.checkpoint, arguments.output, arguments.dtype
    with busy(f"reading {checkpoint}"):
        progress = read_whole_checkpoint(checkpoint)
    require_unused(output)
    config = read_config(arguments.config, run_directory(checkpoint))
    require_same_adapters(progress.settings, identity(config), checkpoint)
    lora = config.student.lora
    if dtype not in (None, "float32") and lora is not None and lora.export == "adapter":
        raise CheckpointError(
            f"--dtype={dtype}: student.lora.export=adapter writes adapters, which are float32; leave --dtype out, or "
            "give a --config with student.lora.export: merged"
        )
    average = None if arguments.average is None else average_of(config, arguments.average)
    written = to_hugging_face(
        checkpoint, config.student, output, None if dtype is None else getattr(torch, dtype), average
    )
    what = "student" if average is None else f"average {arguments.average}"
    return f"wrote {output}: the {what} after step {progress.step:,}, in {str(written).removeprefix('torch.')}"


def averages(config: RunConfig) -> dict[str, str]:
    """Names in checkpoints of the averages of the student's weights, by the teacher's name."""
    return {each.name: str(i) for i, each in enumerate(config.active_teachers) if each.weights == "ema"}


def average_of(config: RunConfig, teacher: str) -> str:
    """Raises CheckpointError where the teacher is no average."""
    if (found := averages(config).get(teacher)) is None:
        there = ", ".join(averages(config)) or "none"
        raise CheckpointError(
            f"--average={teacher}: the run's teachers with weights: ema are {there}; name one of them"
        )
    return found


def from_hf(arguments: argparse.Namespace) -> str:
    output = arguments.output
    checkpoints = CheckpointManager(output.parent, keep_last=1)
    require_first(output, checkpoints)
    run = run_directory(output)
    config = read_config(arguments.config, run)
    model = trained_part(config.student)
    data = read_data(config)
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
    said = f"wrote {output}: {len(weights):,} weights; start with run.output_dir={run} run.resume=auto"
    if config.student.lora is None and (others := other_settings(arguments.model, config.student)):
        shown = "; ".join(f"{key}={here!r}, there {there!r}" for key, (there, here) in others.items())
        said += f"\nwarning: the run computes with what student.model is configured with, which differs: {shown}"
    return said


def run_directory(checkpoint: Path) -> Path:
    return checkpoint.absolute().parent.parent


def read_config(given: Path | None, run: Path) -> RunConfig:
    """Raises CheckpointError where there is none, and ConfigError for settings that are not valid."""
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


def require_first(output: Path, checkpoints: CheckpointManager) -> None:
    """Raises CheckpointError where a run in that directory would not continue from `output`."""
    if output.name != FIRST or output.absolute().parent.name != CHECKPOINTS:
        raise CheckpointError(
            f"--output={output}: a run finds its checkpoints by their names, and this is one before the first step; "
            f"name RUN/{CHECKPOINTS}/{FIRST}, where RUN is to be run.output_dir"
        )
    require_unused(output)
    if later := [step for step in checkpoints.steps() if step]:
        raise CheckpointError(
            f"--output={output}: the run has a checkpoint of step {later[-1]:,} already, from which it would continue; "
            "name another run directory"
        )


def read_data(config: RunConfig) -> Corpus | Prompts:
    """The run's documents or prompts. Raises what reading its tokenizers and its data raises."""
    # On how many devices it will run does not matter to that, and they need not be here.
    whole = {"parallelism": Parallelism()}
    student = read_model_info(config.student.model_copy(update=whole), "student", "cpu")
    teachers = [
        read_model_info(teacher.model_copy(update=whole), f"teachers.{i}", "cpu")
        for i, teacher in enumerate(config.active_teachers)
    ]
    return (load_corpus if config.rollout is None else load_prompts)(config, student, teachers)


def main(arguments: list[str] | None = None) -> int:
    quiet_libraries()
    try:
        print(convert(parse(arguments)))
    except (OPDError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
