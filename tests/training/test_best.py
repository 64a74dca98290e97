"""Catches best checkpoints that are removed or forgotten, and runs that end too early, too late or unsaved."""

import errno
import math
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from nemo_opd.checkpoint import state
from nemo_opd.checkpoint.manager import PROGRESS, read_manifest
from nemo_opd.checkpoint.shards import write_sharded
from nemo_opd.config.train import EarlyStopping, KeepBest
from nemo_opd.errors import ConfigError, OPDError
from nemo_opd.logging.loggers import read
from nemo_opd.training import interrupt
from nemo_opd.training.evaluator import BestSteps, Patience
from nemo_opd.training.interrupt import TimeLimit
from tests.composition import compose
from tests.tiny import Tiny
from tests.training.launch import run_here

METADATA = "state/.metadata"
"""A file that contains the run's folder, so it differs between runs."""
VALUES = [math.nan, 1.0, 3.0, 2.0, 3.0, math.inf, 0.5]


@pytest.mark.parametrize(("mode", "n", "ranked"), [("max", 1, [2]), ("max", 3, [2, 4, 3]), ("min", 2, [6, 1])])
def test_the_best_steps_are_those_of_a_sorted_list(mode: str, n: int, ranked: list[int]) -> None:
    """Bugs: a resume forgets the ranking, the later of equal values wins, or a value that is not finite is ranked."""
    settings = KeepBest.model_validate({"metric": "val/x", "mode": mode, "n": n})
    best, first = BestSteps(settings), {}
    for step, value in enumerate(VALUES):
        first[step] = best.observe(step, {"val/x": value})
        resumed = BestSteps(settings)
        resumed.load_state(best.state())
        best = resumed
    assert [step for step, _ in best.ranked] == ranked
    assert first[1]
    assert not any(first[step] for step in (0, 5))
    other_metric = BestSteps(settings.model_copy(update={"metric": "val/y"}))
    other_metric.load_state(best.state())
    assert not other_metric.ranked


def test_patience_counts_values_that_are_not_better_by_the_difference() -> None:
    settings = EarlyStopping(metric="val/x", mode="min", patience=2, min_delta=0.1)
    patience, ends = Patience(settings), []
    for value in (2.0, 1.95, 1.85, 1.84, math.nan):
        will_end = patience.ends_with({"val/x": value})
        patience.observe({"val/x": value})
        patience.observe({"train/loss": 0.0})
        assert patience.is_over == will_end
        ends.append(patience.is_over)
        resumed = Patience(settings)
        resumed.load_state(patience.state())
        patience = resumed
    assert ends == [False, False, False, False, True]


def test_a_run_ends_when_a_step_and_a_checkpoint_no_longer_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: the next step's evaluation is forgotten, or expected in every step; a clock set an hour forward ends the
    run.
    """
    now = 0.0
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now)
    monkeypatch.setattr(interrupt.time, "time", lambda: 5000.0)
    monkeypatch.setenv("SLURM_JOB_START_TIME", "5600")
    limit = TimeLimit(timedelta(seconds=1000), checkpoint_bytes=0)
    monkeypatch.setattr(interrupt.time, "time", lambda: 5000.0 + 3600)
    limit.saved(20.0)  # expected to take 30 s at most
    limit.begin()
    now = 10.0
    with limit.evaluating("evaluation"):
        now = 210.0
    now = 250.0
    assert not limit.is_up()  # a step of 50 s, and an evaluation of 200 s
    for now, evaluations, is_up in (
        (260.0, [], False),
        (1310.0, ["validation"], False),
        (1330.0, ["evaluation"], True),
        (1519.0, [], False),
        (1521.0, [], True),
    ):
        limit.begin()
        assert limit.is_up(evaluations) == is_up, now


def test_without_slurm_the_age_of_a_job_is_its_process_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_START_TIME", raising=False)
    assert 0 < interrupt.job_age_s() < 86400


@pytest.mark.parametrize("key", ["keep_best", "early_stopping"])
def test_a_metric_that_is_never_measured_is_refused_with_the_nearest(tiny: Tiny, key: str) -> None:
    """Bug: a run of days keeps no checkpoint because of a typo."""
    best = f"++train.{key}={{metric: METRIC, mode: min}}"
    for metric, every, message in (
        ("val/bits_per_bite", "2", "gives it; there are val/bits_per_byte"),
        ("eval/pass@1", "2", "no validation or evaluation of this run gives it"),
        ("val/loss", "null", "measured only after the last step, too late to choose by; set train.valid"),
    ):
        with pytest.raises(ConfigError, match=message):
            compose(*tiny.overrides(best.replace("METRIC", metric), f"++train.validate_every={every}"))


@pytest.mark.world
def test_best_checkpoints_of_runs(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: best checkpoints are removed, or change if the run ends at its time limit and is resumed.

    The best step by the largest loss is the first.
    """
    monkeypatch.setenv("NEMO_OPD_CACHE", str(tmp_path / "cache"))
    best = "++train.keep_best={metric: val/bits_per_byte, mode: max}"
    overrides = tiny.overrides(best, "train.validate_every=1", "train.keep_last=1", "train.save_every=null")
    uninterrupted = run_here(tmp_path / "uninterrupted", overrides)
    monkeypatch.setenv("SLURM_JOB_START_TIME", str(time.time() - 3600))
    parted = run_here(tmp_path / "parted", [*overrides, "++train.save_before='01:00:00'"])
    assert [record["step"] for record in read(parted / "metrics.jsonl")] == [0, 1]
    assert not (parted / "final").exists()
    run_here(parted, [*overrides, "run.resume=auto"])

    for run in (uninterrupted, parted):
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000001", "step_000004"]
        assert same(run / "best", run / "checkpoints" / "step_000001" / "student")
        assert same(run / "best", uninterrupted / "best")
        assert same(run / "final", uninterrupted / "final")
        assert not same(run / "best", run / "final")
        assert "best val/bits_per_byte, of step 1" in (run / "report" / "report.html").read_text()
        records = {record["step"]: record for record in read(run / "metrics.jsonl")}
        for folder, step in {"best": 1, "final": 4}.items():
            (result,) = ModelCard.load(run / folder / "README.md").data.eval_results
            assert result.metric_value == round(records[step]["val/bits_per_byte"], 4)

    stopping = "++train.early_stopping={metric: val/bits_per_byte, mode: max, patience: 2}"
    (tmp_path / "rows.jsonl").write_text('{"text": "1 + 1 =", "answer": "2"}\n')
    sums = f"{{data: {{jsonl_files: {tmp_path / 'rows.jsonl'}, text_key: text}}, reward: {{type: exact}}}}"
    evaluation = f"++evaluation={{greedy: false, max_new_tokens: 1, sets: {{sums: {sums}}}}}"
    stopped = run_here(tmp_path / "stopped", [*overrides, stopping, evaluation])
    records = read(stopped / "metrics.jsonl")
    assert [(record["step"], "eval/sums/pass@1" in record) for record in records] == [(0, True), (1, False), (2, True)]
    assert sorted(path.name for path in (stopped / "checkpoints").iterdir()) == ["step_000001", "step_000002"]
    assert same(stopped / "final", stopped / "checkpoints" / "step_000002" / "student")


@pytest.mark.world
def test_checkpoints_written_in_the_background(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a checkpoint holds the state of a later step, since training continued; or a writing error is lost."""
    monkeypatch.setenv("NEMO_OPD_CACHE", str(tmp_path / "cache"))
    overrides = tiny.overrides("train.save_every=2", "train.keep_last=9", "train.max_steps=5", teachers=1)
    plain = run_here(tmp_path / "plain", overrides)

    def slow(*args: Any, **kwargs: Any) -> None:
        if kwargs["group"] is not None:
            time.sleep(0.5)  # longer than a step
        write_sharded(*args, **kwargs)

    monkeypatch.setattr(state, "write_sharded", slow)
    background = run_here(tmp_path / "background", [*overrides, "++train.async_save=true"])
    for step in ("step_000002", "step_000004", "step_000005"):
        plain_files, background_files = (
            read_manifest(run / "checkpoints" / step).files | dict.fromkeys((PROGRESS, METADATA))
            for run in (plain, background)
        )
        assert plain_files == background_files
    assert sorted(path.name for path in (background / "checkpoints").iterdir()) == [
        "step_000002", "step_000004", "step_000005"
    ]  # fmt: skip

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state, "write_sharded", full)
    with pytest.raises(OPDError, match="No space left"):
        run_here(tmp_path / "full", [*overrides, "++train.async_save=true"])
    assert list((tmp_path / "full" / "checkpoints").iterdir()) == []
    assert not (tmp_path / "full" / "final").exists()


def same(first: Path, second: Path) -> bool:
    """Return whether the weights of two folders are equal to the last bit."""
    weights, expected = (load_file(folder / "model.safetensors") for folder in (first, second))
    return weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)
