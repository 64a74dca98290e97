"""A run that ends early and is resumed equals an uninterrupted run to the last bit.

The run starts from a copy of the reference run some steps before its end, is interrupted, then finished without Ray.
Each part has the reference's config.yaml with other values for settings that may change, such as teachers on separate
devices, which work a batch ahead. A killed driver: cluster/ray/test_signals.
"""

import os
import re
import shutil
import signal
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from nemo_opd.cli.main import ENDED_EARLY
from nemo_opd.config.cluster import Cluster
from nemo_opd.config.composition import from_yaml
from nemo_opd.config.run_fields import Logging
from nemo_opd.logging.loggers import read
from nemo_opd.training.off_policy import distil
from tests.training import dying_teacher
from tests.training.conftest import FAULTY, SAVE_EVERY, STEPS, STUDENT_TIMES, resumed
from tests.training.faulty_workers import SLOW_S
from tests.training.launch import Run, assert_a_signal_to_all_ends

pytestmark = pytest.mark.ray

SAVED = STEPS - SAVE_EVERY
"""Step of the last checkpoint before the end."""
UNDER_WAY = SAVED + 5
"""Step that gets the signal."""
AHEAD = ("cluster.placement=separate", "cluster.teacher_ranks=[1,1]")
"""Teachers read the next batch while the student trains, in the same microbatches as colocated ones."""
SEPARATE = ("cluster.placement=separate", "cluster.teacher_ranks=[2,1]")
"""The first teacher divides a batch over two ranks, the second and the student do not."""
WITHOUT_LOADER_WORKERS = "data.num_workers=0"
"""One process fewer to start; the order of the data does not depend on workers."""
METRICS = "metrics.jsonl"


class Finished(NamedTuple):
    """A run that ended in this process."""

    output_dir: Path
    output: str


def copied(reference: Run, folder: Path) -> Path:
    """Copy the reference run's directory without its final model."""
    shutil.copytree(reference.output_dir, folder)
    shutil.rmtree(folder / "final")
    return folder


def without_last_checkpoint(reference: Run, folder: Path) -> Path:
    copied(reference, folder)
    shutil.rmtree(folder / "checkpoints" / f"step_{STEPS:06d}")
    return folder


@pytest.fixture(scope="module")
def damaged(reference: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a flipped bit in its newest checkpoint's largest shard, and with the start of another checkpoint."""
    folder = copied(reference, tmp_path_factory.mktemp("resume") / "run")
    shard = max((folder / "checkpoints" / f"step_{STEPS:06d}" / "state").glob("*.distcp"), key=os.path.getsize)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    incomplete = folder / "checkpoints" / f".incomplete_step_{STEPS + 1:06d}" / "state"
    incomplete.mkdir(parents=True)
    (incomplete / shard.name).write_bytes(content[: len(content) // 2])
    return folder


@pytest.fixture(scope="module")
def interrupted(reference: Run, damaged: Path) -> Run:
    """A run that is interrupted as by timeout(1), in the middle of a step, while teachers read the next batch."""
    run = resumed(reference, damaged, *AHEAD, script=FAULTY, arguments=["all_slow", str(UNDER_WAY - SAVED)])
    run.wait_for_hang()
    workers = run.workers()
    assert len(workers) == 3
    assert {os.getpriority(os.PRIO_PROCESS, worker.pid) for worker in workers} == {os.getpriority(os.PRIO_PROCESS, 0)}
    run.process.terminate()
    os.killpg(run.process.pid, signal.SIGTERM)
    run.release()
    run.end()
    return run


@pytest.fixture(scope="module")
def finished(reference: Run, interrupted: Run) -> Finished:
    assert interrupted.checkpoints[-1] == f"step_{UNDER_WAY:06d}", interrupted.output
    config = from_yaml(reference.output_dir / "config.yaml")
    config = config.model_copy(
        update={
            "run": config.run.model_copy(update={"output_dir": interrupted.output_dir, "resume": "auto"}),
            "cluster": Cluster(launcher="local"),
            "data": config.data.model_copy(update={"num_workers": 0}),
            "logging": Logging(),
        }
    )
    with redirect_stdout(StringIO()) as output, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        distil(config)
    return Finished(interrupted.output_dir, output.getvalue())


def test_a_damaged_checkpoint_gives_way_to_the_one_before(interrupted: Run) -> None:
    """Bug: the run continues from corrupt weights. The tests below compare its results."""
    name = f"step_{STEPS:06d}"
    output = " ".join(interrupted.output.replace("│", " ").split())
    assert re.search(rf"warning: \S*{name} is damaged: state/__0_0\.distcp \([\d,]+ bytes\) has the SHA-256", output)
    assert f"checkpoints/step_{SAVED:06d} instead, and renames this one damaged_{name}" in output
    assert f"continued after step {SAVED}" in output
    assert f"damaged_{name}" in interrupted.checkpoints
    assert f".incomplete_step_{STEPS + 1:06d}" not in interrupted.checkpoints


def test_a_signal_to_the_group_ends_a_run_after_its_step_with_a_checkpoint(interrupted: Run) -> None:
    """Bug: Ray's processes and the data workers ended at once, and the run with their error."""
    assert interrupted.process.returncode == ENDED_EARLY, interrupted.output
    assert f"ended early after step {UNDER_WAY};" in interrupted.output
    assert "run.resume=auto" in interrupted.last_line, interrupted.output
    assert interrupted.leftovers() == []


def test_teachers_work_while_the_student_trains(interrupted: Run) -> None:
    """Bug: teachers wait for the student. They can hide SLOW_S, the time that the student sleeps.

    On a busy machine they may start late, so the median of the steps has to hide a quarter of it.
    """
    records = interrupted.metrics[SAVED + 3 : UNDER_WAY + 1]
    hidden = sorted(SLOW_S + record["perf/teacher_s"] - record["perf/teacher_wait_s"] for record in records)
    assert hidden[len(hidden) // 2] > 0.25 * SLOW_S


def test_only_the_wait_for_teachers_is_time_of_a_step(interrupted: Run) -> None:
    for record in interrupted.metrics[SAVED + 1 : UNDER_WAY + 1]:
        parts = ["perf/data_wait_s", "perf/teacher_wait_s", *STUDENT_TIMES, "perf/other_s"]
        assert sum(record[name] for name in parts) == pytest.approx(record["perf/step_s"], rel=1e-9)
        assert record["perf/teacher_s"] == max(record["perf/teacher_s/cross"], record["perf/teacher_s/same"])


def test_steps_after_the_checkpoint_are_done_again(finished: Finished) -> None:
    """Bug: a resumed run appends to records that the first run wrote after its checkpoint."""
    assert [record["step"] for record in read(finished.output_dir / METRICS)] == list(range(STEPS + 1))


def test_metrics_equal_those_of_the_uninterrupted_run(reference: Run, finished: Finished) -> None:
    """Bugs: data order that starts anew; optimizer, schedule or moving averages that are lost; weights in bf16. With
    teachers ahead: a batch read twice or skipped at the interruption, buffers overwritten while they are read, rows of
    another rank, a validation that disturbs the batch ahead.
    """
    for expected, actual in zip(reference.metrics, read(finished.output_dir / METRICS), strict=True):
        names = [name for name in expected if not name.startswith("perf/")]
        assert {name: actual.get(name) for name in names} == {name: expected[name] for name in names}, expected["step"]


def test_weights_equal_those_of_the_uninterrupted_run(reference: Run, finished: Finished) -> None:
    trained, expected = (load_file(run.output_dir / "final" / "model.safetensors") for run in (finished, reference))
    for name, value in expected.items():
        assert torch.equal(trained[name], value), name


def test_closing_table_remembers_the_start(reference: Run, finished: Finished) -> None:
    """Bug: a resumed run measures the half-trained student as `before`, or omits the row."""
    for name in ("student before", "teacher cross"):
        expected, actual = (
            next(line for line in run.output.splitlines() if name in line) for run in (reference, finished)
        )
        assert actual.split("│")[2] == expected.split("│")[2]


def test_finished_run_keeps_the_newest_checkpoints(finished: Finished) -> None:
    names = sorted(entry.name for entry in (finished.output_dir / "checkpoints").iterdir())
    assert names[-1] == f"step_{STEPS:06d}"
    assert len([name for name in names if name.startswith("step_")]) == 2


@pytest.mark.nightly
def test_a_teacher_that_dies_is_named(reference: Run, tmp_path: Path) -> None:
    """The rank dies by SIGKILL in a forward pass, while a second rank is in a collective and the student trains.

    Ranks without models: cluster/ray/shared/test_faults.
    """
    folder = without_last_checkpoint(reference, tmp_path / "run")
    script = Path(dying_teacher.__file__)
    bereft = resumed(reference, folder, WITHOUT_LOADER_WORKERS, *SEPARATE, script=script)
    bereft.wait_for_workers()
    bereft.processes()
    assert bereft.end() == 1
    assert re.match(r"error: teacher cross rank 1 died while reading a batch \(step 1\d\) \(", bereft.last_line)
    assert bereft.last_line.endswith("run.resume=auto continues from the last checkpoint")
    assert "Traceback" not in bereft.output
    assert bereft.checkpoints == [f"step_{SAVED:06d}"]
    assert SAVED < bereft.metrics[-1]["step"] < STEPS
    assert bereft.leftovers() == []


@pytest.mark.nightly
def test_signal_to_all_processes_ends_the_run_soon(reference: Run, tmp_path: Path) -> None:
    """Ranks without models: cluster/ray/test_signals."""
    folder = without_last_checkpoint(reference, tmp_path / "run")
    run = resumed(reference, folder, WITHOUT_LOADER_WORKERS, script=FAULTY, arguments=["student_hangs", "3"])
    run.wait_for_hang()
    assert_a_signal_to_all_ends(run)
