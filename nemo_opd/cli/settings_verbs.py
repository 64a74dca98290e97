"""Verbs whose arguments are settings, composed by Hydra; with no arguments, they run the demo on this machine."""

import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_opd.cli.command import exit_status, standard_streams
from nemo_opd.cli.completion import complete_recipe, complete_setting
from nemo_opd.cli.report import report_sweep
from nemo_opd.cluster.placement import Processes
from nemo_opd.config.base import Settings
from nemo_opd.config.command_line import add_options
from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.config.load import S, run_with_hydra
from nemo_opd.config.run import RunConfig
from nemo_opd.evaluation import inputs as evaluation_inputs
from nemo_opd.logging.activity import loading
from nemo_opd.paths import configs_dir
from nemo_opd.preflight.inputs import check_inputs, with_documents_columns
from nemo_opd.training.interrupt import interruptible, was_requested


@dataclass(frozen=True)
class SettingsCommand:
    """A task that receives validated settings."""

    model: type[Settings]
    config_name: Callable[[Sequence[str]], str]
    """Returns the recipe to start from if no `--config` names one. Called with the arguments."""
    task: Callable[[Any], None]

    def run(self, program: str, arguments: Sequence[str]) -> int:
        """Run the task and return the exit status. Raises SystemExit for an error, after printing it on stderr."""
        sys.argv = [program, *arguments]  # Hydra reads it
        main(self.task, self.model, config_dir=configs_dir(), config_name=self.config_name(arguments))
        return 0

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Define the arguments that a shell can complete."""
        config: Any = add_options(parser)
        config.completer = lambda prefix, **_: complete_recipe(prefix, configs_dir())
        settings: Any = parser.add_argument("settings", nargs="*")
        settings.completer = lambda prefix, **_: complete_setting(prefix, self.model, configs_dir())


def main(task: Callable[[S], None], model: type[S], *, config_dir: Path, config_name: str) -> None:
    """Run `task` with the command line's settings. An error ends with one clear line and exit status 1."""
    with standard_streams(), interruptible(), exit_status("nothing was saved since it started"):
        run_with_hydra(
            task,
            model,
            config_dir=config_dir,
            config_name=config_name,
            prepare=with_documents_columns if model is RunConfig else dict,
            after_sweep=report_sweep,
            is_interrupted=was_requested,
            before_default=_announce_demo,
        )


def _announce_demo(recipe: str) -> None:
    """Say on stderr that the run starts from the settings of a demo."""
    if recipe.endswith("_demo") and Processes.started().rank == 0:
        print(
            f"no file is named, so this starts from the demo {recipe}, with tiny models; for your own models and data: "
            f"nemo-opd init DIR, then {Path(sys.argv[0]).name} DIR/FILE.yaml",
            file=sys.stderr,
            flush=True,
        )


def _distil(config: RunConfig) -> None:
    check_inputs(config, on_policy=False)
    # Imported after the checks: PyTorch takes seconds.
    with loading("PyTorch"):
        from nemo_opd.training.off_policy import distil

    distil(config)


def _distil_on_policy(config: RunConfig) -> None:
    check_inputs(config, on_policy=True)
    # Imported after the checks: PyTorch takes seconds.
    with loading("PyTorch"):
        from nemo_opd.training.on_policy import distil

    distil(config)


def _evaluate(config: EvaluationConfig) -> None:
    evaluation_inputs.check_inputs(config)
    # Imported after the checks: PyTorch takes seconds.
    with loading("PyTorch"):
        from nemo_opd.training.standalone import evaluate

    evaluate(config)


def evaluation_recipe(arguments: Sequence[str]) -> str:
    """Return the recipe without questions if the arguments name some; the demo's would be a second source."""
    names_questions = any(
        re.match(r"\+*(data\.(\w+_files|hub\b)|sets\b|benchmarks\b)", argument) for argument in arguments
    )
    return "evaluation" if names_questions else "evaluation_demo"


DISTIL = SettingsCommand(RunConfig, lambda _: "off_policy_demo", _distil)
DISTIL_ON_POLICY = SettingsCommand(RunConfig, lambda _: "on_policy_demo", _distil_on_policy)
EVALUATE = SettingsCommand(EvaluationConfig, evaluation_recipe, _evaluate)
