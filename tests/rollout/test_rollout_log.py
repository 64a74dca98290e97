"""rollouts.jsonl: complete rollouts, files of limited size, and no rollouts of steps that a resumed run repeats."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_opd.config.run_fields import RolloutFiles
from nemo_opd.errors import DataError
from nemo_opd.rollout.collect import RolloutLog
from tests.rollout.test_collect import rollout_of

ONE_BYTE = 1e-6


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_rollout_is_written_completely(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, RolloutFiles(every=2))
    logprobs = np.array([0.0, 0.0, -0.123456789, -np.inf], np.float32)
    rollout = replace(rollout_of([5, 6, 7, 8], [(2, 4)], responses=("\ud83d x",)), logprobs=logprobs)
    assert [step for step in range(1, 5) if log.is_due(step)] == [2, 4]
    log.write(2, [rollout, rollout], [1.0, float("nan")])
    first, second = lines(tmp_path / "rollouts.jsonl")
    assert first["ids"] == [5, 6, 7, 8]
    assert first["loss_mask"] == [0, 0, 1, 1]
    assert first["logprobs"] == [0.0, 0.0, -0.123457, None]
    assert (first["reward"], second["reward"], first["step"]) == (1.0, None, 2)
    assert first["responses"] == ["? x"]


def test_full_files_are_renamed_and_the_oldest_removed(tmp_path: Path) -> None:
    """Bug: names sorted as text, so that step 10 is older than step 9."""
    log = RolloutLog(tmp_path, RolloutFiles(every=1, file_mb=ONE_BYTE, keep_files=2))
    for step in (8, 9, 10):
        log.write(step, [rollout_of([1, 2], [(1, 2)])], [])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rollouts.10.jsonl", "rollouts.9.jsonl"]


def test_later_steps_are_dropped(tmp_path: Path) -> None:
    """Bugs: a renamed file keeps steps after the checkpoint; a torn line stops a run; a repeated step's file replaces
    an earlier step's.
    """
    rollout = rollout_of([1, 2], [(1, 2)])
    log = RolloutLog(tmp_path, RolloutFiles(every=1))
    for step in (1, 2):
        log.write(step, [rollout], [])
    (tmp_path / "rollouts.jsonl").rename(tmp_path / "rollouts.2.jsonl")
    log.write(3, [rollout], [])
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 3, "id')
    log.truncate_after(1)
    assert not (tmp_path / "rollouts.jsonl").exists()
    RolloutLog(tmp_path, RolloutFiles(every=1, file_mb=ONE_BYTE)).write(2, [rollout], [])
    assert {file.name: [line["step"] for line in lines(file)] for file in tmp_path.iterdir()} == {
        "rollouts.1.jsonl": [1],
        "rollouts.2.jsonl": [2],
    }
    log.truncate_after(0)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text('nothing\n{"step": 1}\n')
    with pytest.raises(DataError, match=r"rollouts.jsonl, line 1 is not a rollout"):
        RolloutLog(tmp_path, RolloutFiles()).truncate_after(1)
