"""Evaluation on questions that can be checked; with no arguments, of the demo's student on this machine."""

import re
from collections.abc import Sequence

from nemo_opd.cli.settings_command import SettingsCommand
from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.evaluation.inputs import check_inputs
from nemo_opd.logging.busy import loading


def evaluate(config: EvaluationConfig) -> None:
    check_inputs(config)
    # Imported once settings and paths are known to be right: PyTorch takes seconds.
    with loading("PyTorch"):
        from nemo_opd.training.standalone import evaluate

    evaluate(config)


def config_name(arguments: Sequence[str]) -> str:
    """Return the recipe without questions where the arguments name some: those of the demo would be a second source."""
    names_own = any(re.match(r"\+*(data\.(\w+_files|hub\b)|sets\b|benchmarks\b)", argument) for argument in arguments)
    return "evaluation" if names_own else "evaluation_demo"


COMMAND = SettingsCommand(EvaluationConfig, config_name, evaluate)
