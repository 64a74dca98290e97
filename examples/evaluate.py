"""How well a model answers questions that can be checked; with no arguments, the demo's student on this machine.

uv run examples/evaluate.py model=PATH_OR_HUB data.jsonl_files=questions.jsonl reward=numeric n=8 k=[1,8]
"""

import re
import sys
from pathlib import Path

from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.evaluation.inputs import check_inputs
from nemo_opd.training.cli import loading, main_with

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def evaluate(config: EvaluationConfig) -> None:
    check_inputs(config)
    # Imported once settings and paths are known to be right: PyTorch takes seconds.
    with loading("PyTorch"):
        from nemo_opd.evaluation.standalone import evaluate

    evaluate(config)


def names_own_questions(arguments: list[str]) -> bool:
    """Beside which the demo's would be a second source."""
    return any(re.match(r"\+*(data\.(\w+_files|hub\b)|sets\b|benchmarks\b)", argument) for argument in arguments)


if __name__ == "__main__":
    config_name = "evaluation" if names_own_questions(sys.argv[1:]) else "evaluation_demo"
    main_with(evaluate, EvaluationConfig, config_dir=CONFIGS, config_name=config_name)
