"""The quality benchmark's figures, and the runs that it counts as finished."""

import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.quality_runs import OUTCOME, Outcome, Run, RunError, Runner, Score, finished, scores
from benchmarks.quality_settings import COMMON, CONTROL, SETTINGS
from benchmarks.quality_statistics import compare, interval, student_t


def test_student_t_equals_the_printed_tables() -> None:
    for degrees, printed in {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 30: 2.042, 120: 1.980}.items():
        assert student_t(degrees) == pytest.approx(printed, abs=5e-4)


def test_interval_of_three_seeds() -> None:
    """Bugs: the population's deviation; no division by √n."""
    estimate = interval([1.0, 2.0, 3.0])
    assert estimate.mean == 2
    assert estimate.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert interval([1.5]).half_width is None


def test_differences_are_paired_by_seed() -> None:
    """Bug: a difference without pairs, which has a wide interval here: seeds differ much, but each improves by 0.1."""
    comparison = compare({2: 2.9, 0: 0.9, 1: 1.9}, {0: 1.0, 1: 2.0, 2: 3.0, 3: 50.0})
    assert comparison.difference is not None
    assert comparison.difference.mean == pytest.approx(-0.1)
    assert comparison.difference.half_width == pytest.approx(0, abs=1e-12)
    assert comparison.mean.half_width is not None
    assert comparison.mean.half_width > 1
    assert list(comparison.by_seed) == [0, 1, 2]
    assert compare({0: 1.0}, {1: 1.0}).difference is None


def test_settings_have_names_of_their_own_and_one_control() -> None:
    names = [setting.name for setting in SETTINGS]
    assert len(set(names)) == len(names)
    assert [setting.name for setting in SETTINGS if setting.group == "control"] == [CONTROL]
    assert not any(override.startswith(("run.seed", "train.max_steps")) for override in COMMON)


def run_in(folder: Path) -> Run:
    return Run("p_kl", 1, ("loss=p_kl", "run.seed=1", "train.max_steps=3"), folder / "p_kl" / "seed_1")


OUTCOME_OF_IT = Outcome(
    "p_kl", 1, ("loss=p_kl", "run.seed=1", "train.max_steps=3"), Score(2.0, 0.1), Score(1.5, 0.2), 3, 9.5, "cpu", "abc"
)


def test_only_a_whole_run_of_the_same_settings_is_finished(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    assert finished(run) is None
    run.folder.mkdir(parents=True)
    (run.folder / "metrics.jsonl").write_text('{"step": 3, "val/bits_per_byte": 1.5, "val/accuracy": 0.2}\n')
    assert finished(run) is None, "a run that broke off behind its last validation"
    (run.folder / OUTCOME).write_text(json.dumps(asdict(OUTCOME_OF_IT)))
    assert finished(run) == OUTCOME_OF_IT
    assert finished(replace(run, overrides=(*run.overrides[:-1], "train.max_steps=4"))) is None


def test_scores_are_the_first_and_the_last_validation(tmp_path: Path) -> None:
    records = [
        {"step": 0, "val/bits_per_byte": 2.0, "val/accuracy": 0.1},
        {"step": 1, "train/loss": 3.0},
        {"step": 2, "train/loss": 2.0, "val/bits_per_byte": 1.5, "val/accuracy": 0.2},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert scores(tmp_path) == (Score(2.0, 0.1), Score(1.5, 0.2), 2)


WRITES_METRICS = """
import sys
from pathlib import Path
folder = Path(sys.argv[-1].partition("=")[2])
if "fails" in sys.argv:
    sys.exit("error: loss.nonsense is no key")
assert not folder.exists(), "what a broken run left was removed"
folder.mkdir(parents=True)
(folder / "metrics.jsonl").write_text('{"step": 0, "val/bits_per_byte": 2, "val/accuracy": 0.1}\\n')
"""


@pytest.mark.world
def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an error without the log's last line, and an unfinished run that starts in its old folder."""
    example = tmp_path / "example.py"
    example.write_text(WRITES_METRICS)
    monkeypatch.setattr(sys.modules[Runner.__module__], "EXAMPLE", example)
    broken = Run("nonsense", 0, ("fails",), tmp_path / "nonsense" / "seed_0")
    half = run_in(tmp_path)
    half.folder.mkdir(parents=True)
    (half.folder / "metrics.jsonl").write_text("{")
    results: dict[str, Outcome | RunError] = {}
    Runner(2, "cpu", lambda: "abc").run([broken, half], lambda run, result: results.update({run.setting: result}))
    assert isinstance(results["nonsense"], RunError)
    assert "error: loss.nonsense is no key" in str(results["nonsense"])
    assert finished(broken) is None
    assert broken.log.exists()
    assert finished(half) == results["p_kl"]
