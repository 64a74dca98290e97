#!/usr/bin/env python
"""Converts between a run's sharded checkpoints and Hugging Face folders, in one process and without a GPU."""

import sys

# A script's folder comes first on its path; what it imports is named from the root.
if sys.path[0] == __file__.rpartition("/")[0]:
    sys.path[0] = __file__.rpartition("/tools/")[0]

import argparse
from pathlib import Path

import torch
from rich.console import Console

from nemo_opd.checkpoint.convert import (
    require_unused,
    require_whole_checkpoint,
    to_hugging_face,
)
from nemo_opd.checkpoint.manager import CheckpointManager
from nemo_opd.errors import CheckpointError
from tools.projection import command

DTYPES = ("float32", "bfloat16", "float16")
FIRST = "step_000000"
EPILOG = """\
A checkpoint's `state` has the student's weights in fp32, cut over the ranks of the run. to-hf puts them together for
AutoModelForCausalLM.from_pretrained, as the run does itself in the checkpoint's `student`; in another precision with
--dtype. from-hf makes of weights the first checkpoint of a run, with the optimizer and the data at their beginning: a
run that continues from it starts with these weights in place of those of student.model.

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
    parser = command.make_parser(__doc__, EPILOG)
    commands = parser.add_subparsers(dest="direction", required=True, metavar="DIRECTION")
    there = commands.add_parser("to-hf", help="a checkpoint becomes a Hugging Face folder")
    there.add_argument(
        "--checkpoint", required=True, type=Path, metavar="FOLDER", help="such as RUN/checkpoints/step_000100"
    )
    there.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="a new folder, or an empty one")
    there.add_argument("--dtype", choices=DTYPES, help="of the weights written (default: that of student.model)")
    back = commands.add_parser("from-hf", help="a Hugging Face folder becomes the first checkpoint of a run")
    back.add_argument("--model", required=True, metavar="MODEL", help="folder or hub name of the weights")
    back.add_argument("--output", required=True, type=Path, metavar="FOLDER", help=f"RUN/checkpoints/{FIRST}")
    for each in (there, back):
        each.add_argument(
            "--config", type=Path, metavar="FILE", help="the run's settings (default: config.yaml in its directory)"
        )
    return parser.parse_args(arguments)


def convert(arguments: argparse.Namespace, console: Console) -> None:
    (to_hf if arguments.direction == "to-hf" else from_hf)(arguments, console)


def to_hf(arguments: argparse.Namespace, console: Console) -> None:
    checkpoint, output = arguments.checkpoint, arguments.output
    require_whole_checkpoint(checkpoint)
    require_unused(output)
    config = read_config(arguments.config, run_directory(checkpoint))
    progress = CheckpointManager(checkpoint.parent, config.train.keep_last).read_folder(checkpoint)
    require_same_adapters(progress, config, checkpoint)
    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    if dtype not in (None, torch.float32) and writes_adapter(config):
        raise CheckpointError(
            f"--dtype={arguments.dtype}: student.lora.export=adapter writes adapters, which are float32; leave --dtype "
            "out, or give --config with student.lora.export: merged"
        )
    written = to_hugging_face(checkpoint, config.student, output, dtype)
    say(console, f"wrote {output}: the student after step {progress.step:,}, {str(written).removeprefix('torch.')}")
