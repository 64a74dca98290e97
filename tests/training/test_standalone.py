"""Evaluation of a model over several ranks gives the figures of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.config.run import validated
from nemo_opd.errors import ConfigError
from nemo_opd.logging.scores import SampleLog
from nemo_opd.training.standalone import drive
from tests.workers.local import in_world

SETTINGS = {
    "model": "demo:teacher_same",
    "reward": {"type": "format", "extract": {"type": "regex", "pattern": "[0-9a]"}},
    "sets": {"sums": {"data": {"arrow_files": "demo:arithmetic_validation", "max_samples": 13}}},
    "n": 2,
    "k": [1, 2],
    "max_new_tokens": 12,
    "stop": "e",
    "rollout": {"type": "hf", "batch_size": 3},
}


def config(output_dir: Path, **settings: Any) -> EvaluationConfig:
    return validated(SETTINGS | {"output_dir": str(output_dir)} | settings, EvaluationConfig)


def evaluated(settings: EvaluationConfig) -> Path:
    drive(settings, Console(quiet=True))
    assert settings.output_dir is not None
    return settings.output_dir


def results_in(folder: Path) -> dict[str, Any]:
    results = json.loads((folder / "results.json").read_text())
    results["sets"]["sums"].pop("seconds")
    return results


@pytest.mark.world
def test_ranks_give_the_results_of_one_process(tmp_path: Path) -> None:
    """Bug: answers gathered in another order, or tensor-parallel ranks that end a sequence at different tokens."""
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    more = {"benchmarks": [{"task": "next_line", "limit": 7}], "task_folder": "demo:tasks"}
    (one,) = in_world(1, evaluated, [config(tmp_path / "one", **more)], tmp_path / "world 1")
    layouts = {"dp 2": {}, "tp 2": {"parallelism": {"tp": 2}}}
    two_ranks = {"cluster": {"cpu_ranks": 2}, **more}
    settings = [config(tmp_path / name, **layout, **two_ranks) for name, layout in layouts.items()]
    folders = in_world(2, evaluated, settings, tmp_path / "world 2")

    answers = [answer.response for answer in SampleLog(one / "samples.jsonl").read()]
    assert any(answers)
    assert not any("e" in answer for answer in answers)
    for folder in folders:
        assert [answer.response for answer in SampleLog(folder / "samples.jsonl").read()] == answers
        assert results_in(folder) == results_in(one)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cluster": {"cpu_ranks": 2}}, r"cluster\.cpu_ranks=2: .*torchrun --nproc-per-node=2"),
        ({"parallelism": {"tp": 3}}, "^parallelism: tp=3 .* write parallelism.tp=1"),
    ],
)
def test_ranks_that_cannot_be_started_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluated(config(tmp_path / "out", **settings))


def test_parallelism_is_refused_with_a_server() -> None:
    with pytest.raises(ConfigError, match=r"parallelism: with rollout\.type=server a server with its own ranks"):
        config(Path("x"), parallelism={"tp": 2}, rollout={"type": "server"})
