"""Verbs that convert between checkpoints and Hugging Face folders."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from rich.console import Console

from nemo_opd.checkpoint.manager import CheckpointManager, Progress
from nemo_opd.checkpoint.run_directory import identity, require_same_run
from nemo_opd.cli.command import Command
from nemo_opd.config.composition import from_yaml, to_yaml
from nemo_opd.config.model import Parallelism, require_repo
from nemo_opd.config.run import RunConfig
from nemo_opd.config.secrets import without_secrets
from nemo_opd.errors import CheckpointError
from nemo_opd.files import write_atomically
from nemo_opd.logging.terminal import busy

if TYPE_CHECKING:
    from nemo_opd.preflight.corpus import Corpus
    from nemo_opd.preflight.prompts import Prompts


_CONFIG = "config.yaml"
_CHECKPOINTS = "checkpoints"
_FIRST = "step_000000"
_DTYPES = ("float32", "bfloat16", "float16")
_MODELS = ("config.json", "adapter_config.json")


def _add_to_hf_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", required=True, type=Path, metavar="FOLDER", help="such as RUN/checkpoints/step_000100"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="a new folder, or an empty one")
    parser.add_argument(
        "--average", metavar="NAME", help="write the average of the teacher NAME, which has weights: ema"
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="dtype of the written weights (default: student.model's)")
    _add_config(parser)


def _to_hf(arguments: Namespace, console: Console) -> None:
    """Write the folder. Raises an OPDError; nothing is written then."""
    import torch

    from nemo_opd.checkpoint.convert import (
        read_whole_checkpoint,
        require_unused,
        to_hugging_face,
    )
    from nemo_opd.logging.card import Exported, write_card
    from nemo_opd.training.closing import closing_at

    checkpoint, output, dtype = arguments.checkpoint, arguments.output, arguments.dtype
    with busy(f"reading {checkpoint}"):
        progress = read_whole_checkpoint(checkpoint)
    require_unused(output)
    config = _read_config(arguments.config, _run_directory(checkpoint))
    saved, current = (
        {key: value for key, value in settings.items() if key.startswith("student.lora")}
        for settings in (progress.settings, identity(config))
    )
    require_same_run(saved, current, str(checkpoint))
    lora = config.student.lora
    if dtype not in (None, "float32") and lora is not None and lora.export == "adapter":
        raise CheckpointError(
            f"--dtype={dtype}: student.lora.export=adapter writes adapters, which are float32; leave --dtype out, or "
            "give a --config with student.lora.export: merged"
        )
    average = None if arguments.average is None else _average_of(config, arguments.average)
    label = "student" if average is None else f"average {arguments.average}"
    run, step = _run_directory(checkpoint), progress.step
    exported = Exported(output, f"The {label} after {step:,} steps", step, suffix=f" ({step:,} steps)")
    if average is None and (run / "metrics.jsonl").is_file():
        exported = replace(exported, closing=closing_at(config, run, progress.bits_per_byte, step))
    written = to_hugging_face(
        checkpoint, config.student, output, None if dtype is None else getattr(torch, dtype), average
    )
    write_card(run, exported, to_yaml(config))
    in_dtype = str(written).removeprefix("torch.")
    print(f"wrote {output}: the {label} after step {step:,}, in {in_dtype}")


def _average_of(config: RunConfig, teacher: str) -> str:
    """Return the name that a teacher's average has in checkpoints. Raises CheckpointError if it has no average."""
    if (average := _averages(config).get(teacher)) is None:
        names = ", ".join(_averages(config))
        way_out = f"the run has {names}; name one of them" if names else "the run has none; leave it out"
        raise CheckpointError(f"--average={teacher}: not a teacher with weights: ema; {way_out}")
    return average


TO_HF = Command(
    "Converts a run's checkpoint to a Hugging Face folder, in one process and without a GPU.",
    """\
A checkpoint's `state` has the student's weights in fp32, sharded over the ranks of the run. They are merged for
AutoModelForCausalLM.from_pretrained, like the checkpoint's own `student`; in another precision with --dtype; with
--average, the moving average that a teacher uses. If the run trains adapters (student.lora), student.lora.export
determines the form. The model is held in memory once, in the written precision.

example:
  nemo-opd checkpoint to-hf --checkpoint RUN/checkpoints/step_000100 --output student_fp32 --dtype float32
""",
    _add_to_hf_arguments,
    _to_hf,
)


def _add_push_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, type=Path, metavar="FOLDER", help="such as RUN/final, or a folder written by to-hf"
    )
    parser.add_argument("--repo", required=True, metavar="USER/NAME", help="repository on the hub")
    parser.add_argument("--public", action="store_true", help="make a new repository public")


def _push(arguments: Namespace, console: Console) -> None:
    """Push the folder. Raises an OPDError if it is not a model's, or if the hub rejects it."""
    from nemo_opd.models.folder import push, require_hub

    folder, repo = arguments.model, arguments.repo
    _require_model(folder)
    try:
        require_repo(repo)
    except ValueError as error:
        raise CheckpointError(f"--repo={repo}: {error}") from error
    require_hub(f"--repo={repo}")
    with busy(f"pushing {folder}"):
        url = push(folder, repo, private=not arguments.public)
    print(f"pushed {folder} to {url}")


def _require_model(folder: Path) -> None:
    """Raise CheckpointError if the folder has no model or adapter; the message suggests a subfolder that has one."""
    if any((folder / name).is_file() for name in _MODELS):
        return
    from nemo_opd.models.folder import model_below

    model = model_below(folder)
    way_out = f"its model is {model}" if model else "name a folder such as RUN/final, or make one with checkpoint to-hf"
    raise CheckpointError(f"--model={folder}: there is no {' or '.join(_MODELS)}; {way_out}")


PUSH = Command(
    "Uploads a model's folder, with its card, to the Hugging Face Hub.",
    """\
Uses the token of HF_TOKEN or `hf auth login`. Only the folder's files are sent; README.md is the card. A repository
that does not exist is created, private without --public; the visibility of an existing one is not changed.

example:
  nemo-opd checkpoint push --model RUN/final --repo me/my-student
""",
    _add_push_arguments,
    _push,
)


def _add_from_hf_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="MODEL", help="folder or hub name of the weights")
    parser.add_argument("--output", required=True, type=Path, metavar="FOLDER", help=f"RUN/checkpoints/{_FIRST}")
    _add_config(parser)


def _from_hf(arguments: Namespace, console: Console) -> None:
    """Write the checkpoint. Raises an OPDError; nothing is written then."""
    from nemo_opd.checkpoint.convert import other_settings, save_start, trained_part, weights_to_start_from
    from nemo_opd.preflight.teachers import settle_tokenizers
    from nemo_opd.workers.optimizer import build_optimizer, build_scheduler

    output = arguments.output
    checkpoints = CheckpointManager(output.parent, keep_last=1)
    _require_first(output, checkpoints)
    run = _run_directory(output)
    config = _read_config(arguments.config, run)
    _require_zeros_at_first(config)
    config = settle_tokenizers(config, "cpu")
    model = trained_part(config.student)
    data = _read_data(config)
    weights = weights_to_start_from(arguments.model, config.student, model)
    total_steps = config.train.max_steps or sum(data.steps(config))
    origin = _origin(arguments.model)
    progress = Progress(step=0, loader=data.start(config), settings=identity(config), started_from=origin)
    with checkpoints.writing(progress) as folder:
        save_start(
            folder,
            weights,
            model,
            partial(build_optimizer, config.student.optimizer),
            lambda optimizer: build_scheduler(config.student.scheduler, optimizer, total_steps),
            averages=list(_averages(config).values()),
        )
    if not (run / _CONFIG).exists():
        write_atomically(run / _CONFIG, to_yaml(config).encode())
    message = f"wrote {output}: {len(weights):,} weights; start with run.output_dir={run} run.resume=auto"
    if config.student.lora is None and (differing := other_settings(arguments.model, config.student)):
        settings = "; ".join(f"{key}={used!r}, there {stored!r}" for key, (stored, used) in differing.items())
        message += f"\nwarning: the run uses student.model's configuration, which differs: {settings}"
    print(message)


def _origin(model: str) -> str:
    """Return a model's reference in a form that holds in any directory, without secrets."""
    return str(Path(model).absolute()) if Path(model).exists() else without_secrets(model)


def _require_first(output: Path, checkpoints: CheckpointManager) -> None:
    """Raise CheckpointError if a run in that directory would not continue from `output`."""
    if output.name != _FIRST or output.absolute().parent.name != _CHECKPOINTS:
        raise CheckpointError(
            f"--output={output}: a run finds its checkpoints by name, and this checkpoint precedes the first step; "
            f"name it RUN/{_CHECKPOINTS}/{_FIRST}, with RUN as run.output_dir"
        )
    from nemo_opd.checkpoint.convert import require_unused

    require_unused(output)
    if later := [step for step in checkpoints.steps() if step]:
        raise CheckpointError(
            f"--output={output}: the run already has a checkpoint of step {later[-1]:,} and would continue from it; "
            "name another run directory"
        )


def _require_zeros_at_first(config: RunConfig) -> None:
    """Raise CheckpointError for an optimizer whose initial state may not be zeros."""
    if (kind := config.student.optimizer.type) in ("adamw_8bit", "class"):
        raise CheckpointError(
            f"student.optimizer.type={kind}: its state before the first step is not known; start a run with the "
            "weights as student.model"
        )


def _read_data(config: RunConfig) -> Corpus | Prompts:
    """Return the run's documents or prompts. Raises the errors of reading its tokenizers and its data."""
    from nemo_opd.preflight.corpus import load_corpus
    from nemo_opd.preflight.model_info import read_model_info
    from nemo_opd.preflight.prompts import load_prompts

    # The parallel layout does not affect the data, and its devices may be missing here.
    unsharded = {"parallelism": Parallelism()}
    student = read_model_info(config.student.model_copy(update=unsharded), "student", "cpu")
    teachers = [
        read_model_info(teacher.model_copy(update=unsharded), f"teachers.{i}", "cpu")
        for i, teacher in enumerate(config.active_teachers)
    ]
    return (load_corpus if config.rollout is None else load_prompts)(config, student, teachers)


FROM_HF = Command(
    "Converts a Hugging Face folder to the first checkpoint of a run, in one process and without a GPU.",
    """\
Optimizer and data are at their start: a run that continues from the checkpoint starts with these weights instead of
student.model's. If the run trains adapters (student.lora), the folder must be peft's. The model is held in memory once,
in fp32.

example:
  nemo-opd distil train.max_steps=200 --cfg job --resolve > run.yaml
  nemo-opd checkpoint from-hf --model WEIGHTS --output RUN/checkpoints/step_000000 --config run.yaml
  nemo-opd distil train.max_steps=200 run.output_dir=RUN run.resume=auto
""",
    _add_from_hf_arguments,
    _from_hf,
)


def _add_config(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the run's settings (default: config.yaml in its directory)"
    )


def _run_directory(checkpoint: Path) -> Path:
    return checkpoint.absolute().parent.parent


def _read_config(path: Path | None, run: Path) -> RunConfig:
    """Read the settings in `path`, by default the run's. Raises CheckpointError if missing, ConfigError if invalid."""
    file = path or run / _CONFIG
    if not file.is_file():
        key = "--config" if path is None else f"--config={path}"
        raise CheckpointError(
            f"{key}: there is no {file}; give the run's settings as a file, which its own command writes with "
            "`--cfg job --resolve > FILE`"
        )
    try:
        return from_yaml(file, follow_link=path is not None)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file} cannot be read ({reason}); give another file as --config") from error


def _averages(config: RunConfig) -> dict[str, str]:
    """Return the names that the student's averages have in checkpoints, by the teacher's name."""
    return {teacher.name: str(i) for i, teacher in enumerate(config.active_teachers) if teacher.weights == "ema"}
