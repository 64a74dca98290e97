"""Verbs whose arguments are settings, composed by Hydra; with no arguments, they run the demo on this machine."""

import json
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nemo_opd.cli.command import add_output_options, exit_status, output_of, standard_streams
from nemo_opd.cli.completion import complete_recipe, complete_setting
from nemo_opd.cli.main import ENDED_EARLY
from nemo_opd.cli.runs import report_sweep
from nemo_opd.cluster.placement import Processes
from nemo_opd.config.command_line import add_options
from nemo_opd.config.composition import run_with_hydra
from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.config.run import RunConfig, S
from nemo_opd.config.settings import Settings
from nemo_opd.errors import ConfigError
from nemo_opd.evaluation import question_sets
from nemo_opd.logging.terminal import loading
from nemo_opd.paths import configs_dir
from nemo_opd.preflight.inputs import with_documents_columns, with_question_columns
from nemo_opd.training.entry import run
from nemo_opd.training.finished import Finished
from nemo_opd.training.interrupt import interruptible, was_requested

_ALL_OUTPUT = Namespace(json=False, quiet=False)


@dataclass(frozen=True)
class SettingsCommand:
    """A task that receives validated settings."""

    model: type[Settings]
    config_name: Callable[[Sequence[str]], str]
    """Returns the recipe to start from if no `--config` names one. Called with the arguments."""
    task: Callable[[Any], Finished | None]

    def run(self, program: str, arguments: Sequence[str]) -> int:
        """Run the task and return the exit status. Raises SystemExit for an error, after printing it on stderr."""
        parser = ArgumentParser(program, add_help=False, allow_abbrev=False)
        add_output_options(parser)
        options, remaining = parser.parse_known_args(arguments)
        sys.argv = [program, *remaining]  # Hydra reads it
        name = self.config_name(remaining)
        return main(self.task, self.model, config_dir=configs_dir(), config_name=name, output=options)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Define the arguments that a shell can complete."""
        add_output_options(parser)
        config: Any = add_options(parser)
        config.completer = lambda prefix, **_: complete_recipe(prefix, configs_dir())
        settings: Any = parser.add_argument("settings", nargs="*")
        settings.completer = lambda prefix, **_: complete_setting(prefix, self.model, configs_dir())


def main(
    task: Callable[[S], Finished | None],
    model: type[S],
    *,
    config_dir: Path,
    config_name: str,
    output: Namespace = _ALL_OUTPUT,
) -> int:
    """Run `task` with the command line's settings and return the exit status.

    output: options `json` and `quiet`. An error ends with one clear line on stderr and SystemExit with status 1.
    """
    ended: list[Finished] = []

    def note_end(config: S) -> None:
        if (finished := task(config)) is not None:
            ended.append(finished)

    with (
        standard_streams(),
        interruptible(),
        exit_status("nothing was saved since it started"),
        output_of(output) as print_json,
    ):
        run_with_hydra(
            note_end,
            model,
            config_dir=config_dir,
            config_name=config_name,
            prepare=with_documents_columns if model is RunConfig else evaluation_settings,
            after_sweep=report_sweep,
            is_interrupted=was_requested,
            before_default=(lambda _: None) if output.quiet else _announce_demo,
        )
        if output.json and ended:
            results = [_result(finished) for finished in ended]
            print_json(results[0] if len(results) == 1 else {"runs": results})
    return 0 if all(finished.is_complete for finished in ended) else ENDED_EARLY


def evaluation_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Take files that `data` is short for as questions, and find out their columns.

    Raises ConfigError for the settings of a run.
    """
    if "student" in settings:
        raise ConfigError(
            "student: this file configures a run, and nemo-opd evaluate takes a model and questions: model=FOLDER, "
            "such as final in the run's directory, with data, sets or benchmarks (docs/evaluation.md)"
        )
    data = settings.get("data")
    if not isinstance(data, Mapping):
        return settings
    data, files = dict(data), data.get("train")
    if isinstance(files, Mapping):
        del data["train"]
        data |= files
    return {**settings, "data": with_question_columns(data)}


def _result(finished: Finished) -> object:
    """Return the facts of a run, or the result of a dry run or an evaluation."""
    if finished.checks is not None:
        return finished.checks
    from nemo_opd.training.finished import read_facts  # a slow import

    return read_facts(finished.output_dir)


def _announce_demo(recipe: str) -> None:
    """Say on stderr that the run starts from the settings of a demo."""
    if recipe.endswith("_demo") and Processes.started().rank == 0:
        program = Path(sys.argv[0]).name
        command = f"nemo-opd init DIR, then {program} DIR/FILE.yaml"
        if recipe == "evaluation_demo":
            command = f"{program} model=FOLDER data=FILE reward=numeric"
        print(
            f"no file is named, so this starts from the demo {recipe}, with tiny models; for your own models and data: "
            + command,
            file=sys.stderr,
            flush=True,
        )


def _evaluate(config: EvaluationConfig) -> Finished | None:
    question_sets.check_inputs(config)
    # Imported after the checks: PyTorch takes seconds.
    with loading("PyTorch"):
        from nemo_opd.training.standalone import RESULTS, evaluate, evaluation_folder

    folder = evaluation_folder(config)
    evaluate(config, output_dir=folder)
    if Processes.started().rank > 0:
        return None
    results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    return Finished(folder, checks={"output_dir": str(folder), **results})


def evaluation_recipe(arguments: Sequence[str]) -> str:
    """Return the recipe without questions if the arguments name some; the demo's would be a second source."""
    names_questions = any(
        re.match(r"\+*(data=|data\.(\w+_files|hub\b)|sets\b|benchmarks\b)", argument) for argument in arguments
    )
    return "evaluation" if names_questions else "evaluation_demo"


DISTIL = SettingsCommand(RunConfig, lambda _: "off_policy_demo", partial(run, on_policy=False))
DISTIL_ON_POLICY = SettingsCommand(RunConfig, lambda _: "on_policy_demo", partial(run, on_policy=True))
EVALUATE = SettingsCommand(EvaluationConfig, evaluation_recipe, _evaluate)
