"""Evaluation in a run: sets and benchmarks of the student and its teachers, and one that fails half-way."""

import json
import sys
import types
from pathlib import Path

import pytest

from nemo_opd.data.record import Rollout
from nemo_opd.errors import RolloutError
from nemo_opd.logging.jsonl import read
from nemo_opd.logging.question_values import read_values
from tests.tiny import Tiny
from tests.training.launch import run_here

mine = types.ModuleType("rewards_of_an_evaluation")


@pytest.fixture
def overrides(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(sys.modules, mine.__name__, mine)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"{i} + 1 =", "answer": i + 1, "level": i}) + "\n" for i in range(4)))
    own = f"{{data:{{jsonl_files:{rows},text_key:text}},reward:{{type:function,function:'{mine.__name__}:reward'}}}}"
    return [
        *tiny.overrides(),
        "train.max_steps=2",
        "train.save_every=null",
        f"++evaluation={{every:1,teachers:true,max_new_tokens:3,sets:{{own:{own}}}}}",
    ]


def test_an_off_policy_run_asks_student_and_teachers(overrides: list[str], tmp_path: Path) -> None:
    """Bug: columns that do not reach the reward, an engine with former weights, teachers asked in other tokens."""
    mine.reward = lambda rollout: float(rollout.prompt.row["level"] % 2)
    benchmarks = ["++evaluation.benchmarks=[{task:next_line,limit:4}]", "++evaluation.task_folder=demo:tasks"]
    folder = run_here(tmp_path / "run", [*overrides, *benchmarks])
    first, *steps = read(folder / "metrics.jsonl")
    names = {each.teacher for each in read_values(folder / "evaluation.jsonl")} - {None}

    assert [record["eval/own/greedy"] for record in (first, *steps)] == [0.5] * 3
    assert names
    assert {first[f"eval/own/greedy/{name}"] for name in names} == {0.5}
    assert {f"eval/next_line/acc{end}" for end in ("", "_low", "_high")} <= steps[-1].keys()
    assert all(0 <= first[f"eval/next_line/acc/{name}"] <= 1 for name in names)
    assert "own/greedy" in (folder / "report" / "report.html").read_text(encoding="utf-8")


def test_an_evaluation_that_fails_is_told_and_the_run_goes_on(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine.reward = fails
    folder = run_here(tmp_path / "run", [*overrides, "evaluation.teachers=false"])

    assert [record["step"] for record in read(folder / "metrics.jsonl")] == [0, 1, 2]
    assert "own: asking the student failed after step 1: the reward failed for all" in " ".join(
        capsys.readouterr().out.split()
    )
    with pytest.raises(RolloutError, match="raised ValueError: no"):
        run_here(tmp_path / "stop", [*overrides, "evaluation.teachers=false", "++evaluation.on_error=stop"])


def fails(_: Rollout) -> float:
    raise ValueError("no")
