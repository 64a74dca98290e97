"""Converts a run's checkpoint to a Hugging Face folder, in one process and without a GPU."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from nemo_opd.cli.checkpoint.run_settings import add_config, average_of, read_config, run_directory
from nemo_opd.cli.command import Command
from nemo_opd.config.load import to_yaml
from nemo_opd.errors import CheckpointError
from nemo_opd.logging.busy import busy

_DTYPES = ("float32", "bfloat16", "float16")
EPILOG = """\
A checkpoint's `state` has the student's weights in fp32, sharded over the ranks of the run. They are merged for
AutoModelForCausalLM.from_pretrained, like the checkpoint's own `student`; in another precision with --dtype; with
--average, the moving average that a teacher uses. If the run trains adapters (student.lora), student.lora.export
determines the form. The model is held in memory once, in the written precision.

example:
  nemo-opd checkpoint to-hf --checkpoint RUN/checkpoints/step_000100 --output student_fp32 --dtype float32
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", required=True, type=Path, metavar="FOLDER", help="such as RUN/checkpoints/step_000100"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="a new folder, or an empty one")
    parser.add_argument(
        "--average", metavar="NAME", help="write the average of the teacher NAME, which has weights: ema"
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="dtype of the written weights (default: student.model's)")
    add_config(parser)


def convert(arguments: Namespace, console: Console) -> None:
    """Write the folder. Raises an OPDError; nothing is written then."""
    import torch

    from nemo_opd.checkpoint.convert import (
        read_whole_checkpoint,
        require_same_adapters,
        require_unused,
        to_hugging_face,
    )
    from nemo_opd.checkpoint.identity import identity
    from nemo_opd.logging.card import Exported, write_card
    from nemo_opd.training.closing import closing_at

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
    label = "student" if average is None else f"average {arguments.average}"
    run, step = run_directory(checkpoint), progress.step
    exported = Exported(output, f"The {label} after {step:,} steps", step, suffix=f" ({step:,} steps)")
    if average is None and (run / "metrics.jsonl").is_file():
        exported = replace(exported, closing=closing_at(config, run, progress.bits_per_byte, step))
    written = to_hugging_face(
        checkpoint, config.student, output, None if dtype is None else getattr(torch, dtype), average
    )
    write_card(run, exported, to_yaml(config))
    in_dtype = str(written).removeprefix("torch.")
    print(f"wrote {output}: the {label} after step {step:,}, in {in_dtype}")


COMMAND = Command(__doc__, EPILOG, add_arguments, convert)
