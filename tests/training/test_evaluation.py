"""Evaluation in a run: sets and benchmarks of the student and its teachers, and one that fails half-way."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.config.run import validated
from nemo_opd.data.row_types import Rollout
from nemo_opd.errors import RolloutError
from nemo_opd.logging.loggers import read
from nemo_opd.logging.scores import SampleLog, ShownAnswer
from nemo_opd.training.standalone import evaluate
from tests.tiny import Tiny
from tests.training.launch import run_here

mine = types.ModuleType("rewards_of_an_evaluation")


@pytest.fixture
def overrides(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(sys.modules, mine.__name__, mine)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"{i} + 1 =", "answer": i + 1, "level": i}) + "\n" for i in range(4)))
    reward = f"{{type:function,function:'{mine.__name__}:reward'}}"
    questions = f"{{data:{{jsonl_files:{rows},text_key:text}},reward:{reward}}}"
    return [
        *tiny.overrides(),
        "train.max_steps=2",
        "train.save_every=null",
        f"++evaluation={{every:1,teachers:true,max_new_tokens:3,sets:{{sums:{questions}}}}}",
    ]


def test_an_off_policy_run_asks_student_and_teachers(overrides: list[str], tmp_path: Path) -> None:
    """Bug: columns that do not reach the reward, an engine with old weights, prompts in another model's tokens."""
    mine.reward = lambda rollout: float(rollout.prompt.row["level"] % 2)
    benchmarks = ["++evaluation.benchmarks=[{task:next_line,limit:4}]", "++evaluation.task_folder=demo:tasks"]
    folder = run_here(tmp_path / "run", [*overrides, "student.optimizer.lr=0.05", *benchmarks])
    first, *_, last = read(folder / "metrics.jsonl")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    answers = SampleLog(folder / "samples.jsonl").read()

    assert first["eval/sums/greedy"] == last["eval/sums/greedy"] == 0.5
    assert texts(answers, 0, None) != texts(answers, 2, None)
    teachers = ((settings["model"], 0, settings["name"]) for settings in config["teachers"])
    for model, step, teacher in [(folder / "final", 2, None), *teachers]:
        alone = tmp_path / f"alone {teacher}"
        evaluate(standalone(model, config, alone), Console(quiet=True))
        accuracy = json.loads((alone / "results.json").read_text())["benchmarks"]["next_line"]["estimates"]["acc"]
        record, ending = (last, "") if teacher is None else (first, f"/{teacher}")
        assert texts(answers, step, teacher) == texts(SampleLog(alone / "samples.jsonl").read(), 0, None)
        assert accuracy == {
            "value": record[f"eval/next_line/acc{ending}"],
            "low": record[f"eval/next_line/acc_low{ending}"],
            "high": record[f"eval/next_line/acc_high{ending}"],
        }
    assert "sums/greedy" in (folder / "report" / "report.html").read_text(encoding="utf-8")


def standalone(model: Path | str, config: dict[str, Any], output_dir: Path) -> EvaluationConfig:
    """Return settings for an evaluation of one model with the run's questions."""
    settings = {
        key: value for key, value in config["evaluation"].items() if key in EvaluationConfig.model_fields and value
    }
    return validated(
        {**settings, "model": str(model), "seed": config["run"]["seed"], "output_dir": str(output_dir)},
        EvaluationConfig,
    )


def texts(answers: list[ShownAnswer], step: int, teacher: str | None) -> list[str]:
    key = step, teacher, "greedy"
    return [answer.response for answer in answers if (answer.step, answer.teacher, answer.kind) == key]


def test_an_evaluation_that_fails_is_reported_and_the_run_continues(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine.reward = fails
    folder = run_here(tmp_path / "run", [*overrides, "evaluation.teachers=false"])

    assert [record["step"] for record in read(folder / "metrics.jsonl")] == [0, 1, 2]
    assert "sums: asking the student failed after step 1: the reward failed for all" in " ".join(
        capsys.readouterr().err.split()
    )
    with pytest.raises(RolloutError, match="raised ValueError: no"):
        run_here(tmp_path / "stop", [*overrides, "evaluation.teachers=false", "++evaluation.on_error=stop"])


def fails(_: Rollout) -> float:
    raise ValueError("no")
