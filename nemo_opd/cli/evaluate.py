"""Evaluation on questions with checkable answers; with no arguments, of the demo's student on this machine."""

import re
from collections.abc import Sequence

from nemo_opd.cli.settings_command import SettingsCommand
from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.evaluation.inputs import check_inputs
from nemo_opd.logging.busy import loading


def evaluate(config: EvaluationConfig) -> None:
    check_inputs(config)
    # Imported after the checks: PyTorch takes seconds.
    with loading("PyTorch"):
        from nemo_opd.training.standalone import evaluate

    evaluate(config)


def config_name(arguments: Sequence[str]) -> str:
    """Return the recipe without questions if the arguments name some; the demo's would be a second source."""
    names_questions = any(
        re.match(r"\+*(data\.(\w+_files|hub\b)|sets\b|benchmarks\b)", argument) for argument in arguments
    )
    return "evaluation" if names_questions else "evaluation_demo"


COMMAND = SettingsCommand(EvaluationConfig, config_name, evaluate)
