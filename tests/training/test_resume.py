"""A run that is ended on its way in every manner gives the results of one that is left alone, to the last bit.

Each fixture is the run's next part, started with the reference's config.yaml but for what may change between parts:
where its teachers are, too. On devices of their own they are a batch ahead of the student.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training import dying_teacher, dying_writer
from tests.training.conftest import FAULTY, SAVE_EVERY, STEPS, STUDENT_TIMES, resumed
from tests.training.faulty_workers import SLOW_S
from tests.training.launch import Run

pytestmark = pytest.mark.ray

WITHOUT_LOADER_WORKERS = "data.num_workers=0"
"""A process less to start; the order of the data does not depend on them."""
SEPARATE = (WITHOUT_LOADER_WORKERS, "cluster.placement=separate", "cluster.teacher_ranks=[2,1]")
"""One teacher cuts a batch in two where the student has it whole, the other one does not."""
UNDER_WAY = SAVE_EVERY + 7
"""Step in which the signal comes."""
RAY_GIVES_UP_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume") / "run"


@pytest.fixture(scope="module")
def killed(reference: Run, folder: Path) -> Run:
    """By SIGKILL of the driver, in the middle of a step, some steps after the first checkpoint."""
    run = resumed(reference, folder, script=FAULTY, arguments=["student_hangs", str(SAVE_EVERY + 3)])
    run.wait_for_hang()
    assert len(run.workers()) == 3
    run.process.kill()
    run.end()
    return run


@pytest.fixture(scope="module")
def interrupted(reference: Run, killed: Run, folder: Path) -> Run:
    """As by timeout(1), in the middle of a step, with another batch under way; each half of one is slow until then."""
    killed.leftovers(folders=False)
    half_written = folder / "checkpoints" / ".incomplete_step_000020"
    half_written.mkdir(exist_ok=True)
    given = [setting for setting in SEPARATE if setting != WITHOUT_LOADER_WORKERS]
    run = resumed(reference, folder, *given, script=FAULTY, arguments=["all_slow", str(UNDER_WAY - SAVE_EVERY)])
    run.wait_for_hang()
    assert len(run.workers()) == 4
    run.process.terminate()
    os.killpg(run.process.pid, signal.SIGTERM)
    run.release()
    run.end()
    assert run.checkpoints[-1] == f"step_{UNDER_WAY:06d}", "a checkpoint of the step that was under way"
    return run


@pytest.fixture(scope="module")
def broken(reference: Run, interrupted: Run, folder: Path) -> Run:
    """The student dies while it writes a checkpoint."""
    step = str(2 * SAVE_EVERY)
    run = resumed(reference, folder, WITHOUT_LOADER_WORKERS, script=Path(dying_writer.__file__), arguments=[step])
    run.wait_for_step(2 * SAVE_EVERY - 1)
    run.processes()
    run.end()
    return run


@pytest.fixture(scope="module")
def bereft(reference: Run, broken: Run, folder: Path) -> Run:
    """A teacher dies in the middle of a forward pass: its other rank is in a collective, and the student trains."""
    run = resumed(reference, folder, *SEPARATE, script=Path(dying_teacher.__file__))
    run.wait_for_step(2 * SAVE_EVERY + 1)  # beyond what the broken run has left in the file
    run.processes()
    run.end()
    return run


@pytest.fixture(scope="module")
def terminated(reference: Run, bereft: Run, folder: Path) -> tuple[Run, float]:
    """SIGTERM to all of its processes, Ray's own among them; and the seconds that the run took to end."""
    run = resumed(reference, folder, WITHOUT_LOADER_WORKERS, script=FAULTY, arguments=["student_hangs", "5"])
    run.wait_for_hang()
    for process in run.processes():
        process.terminate()
    start_s = time.monotonic()
    run.end()
    return run, time.monotonic() - start_s


@pytest.fixture(scope="module")
def damaged(terminated: tuple[Run, float], folder: Path) -> str:
    """A bit of the newest checkpoint flips, in the student's weights or their moments; the name of the checkpoint."""
    newest = max(folder.glob("checkpoints/step_*"))
    shard = max((newest / "state").glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    return newest.name


@pytest.fixture(scope="module")
def finished(reference: Run, damaged: str, folder: Path) -> Run:
    run = resumed(reference, folder, *SEPARATE)
    assert run.end() == 0, run.output
    return run


def test_killed_run_leaves_whole_checkpoints_and_no_process(killed: Run) -> None:
    """Its Ray folder stays; the next run removes it."""
    assert killed.process.returncode == -9
    assert killed.leftovers(folders=False) == []
    assert "step_000010" in killed.checkpoints


def test_next_run_clears_up_after_a_killed_one(killed: Run, interrupted: Run) -> None:
    assert killed.ray_folders
    assert not any(folder.exists() for folder in killed.ray_folders)


def test_a_signal_to_the_group_ends_a_run_after_its_step_with_a_checkpoint(interrupted: Run) -> None:
    """Bug: Ray's processes and the data workers ended at once, and the run with their error."""
    assert interrupted.process.returncode == 0, interrupted.output
    assert f"ended after step {UNDER_WAY};" in interrupted.output
    assert "run.resume=auto" in interrupted.last_line, interrupted.output
    assert interrupted.leftovers() == []


def test_teachers_work_while_the_student_trains(interrupted: Run) -> None:
    """What they take and nobody waits for is as long as the student sleeps, however busy the machine is.

    A quarter of that is asked for, and only of most steps: they may begin late.
    """
    records = interrupted.metrics[SAVE_EVERY + 3 :]
    hidden = sorted(SLOW_S + record["perf/teacher_s"] - record["perf/teacher_wait_s"] for record in records)
    assert hidden[len(hidden) // 2] > 0.25 * SLOW_S


def test_only_the_wait_for_teachers_is_time_of_a_step(interrupted: Run) -> None:
    for record in interrupted.metrics[SAVE_EVERY + 1 :]:
        parts = ["perf/data_wait_s", "perf/teacher_wait_s", *STUDENT_TIMES, "perf/other_s"]
        assert sum(record[name] for name in parts) == pytest.approx(record["perf/step_s"], rel=1e-9)
        assert record["perf/teacher_s"] == max(record["perf/teacher_s/cross"], record["perf/teacher_s/same"])


def test_worker_killed_while_writing_a_checkpoint(broken: Run) -> None:
    assert broken.process.returncode == 1
    assert broken.last_line.startswith("error: student rank 0 died while writing a checkpoint (")
    assert "Traceback" not in broken.output
    assert broken.checkpoints[-1] == f"step_{UNDER_WAY:06d}", "the half-written one is gone"
    assert broken.leftovers() == []


def test_a_killed_teacher_is_named_with_rank_and_phase(bereft: Run) -> None:
    assert bereft.process.returncode == 1
    assert re.match(r"error: teacher cross rank 1 died while reading a batch \(step 2\d\) \(", bereft.last_line)
    assert bereft.last_line.endswith("run.resume=auto continues from the last checkpoint")
    assert "Traceback" not in bereft.output
    assert bereft.checkpoints[-1] == f"step_{2 * SAVE_EVERY:06d}"
    assert bereft.metrics[-1]["step"] < STEPS
    assert bereft.leftovers() == []


def test_signal_to_all_processes_ends_the_run_soon(terminated: tuple[Run, float]) -> None:
    """Bug: waiting for Ray, which has ended with the workers, until Ray itself ends the driver after a minute."""
    run, seconds = terminated
    assert seconds < RAY_GIVES_UP_S, run.output
    assert run.process.returncode == 1
    assert run.last_line.endswith("run.resume=auto continues from the last checkpoint"), run.output
    assert "Failed to connect to GCS" not in run.output
    assert run.leftovers() == []


def test_a_damaged_checkpoint_gives_way_to_the_one_before(damaged: str, finished: Run) -> None:
    """Bug: the run continues from weights that it never had. The tests below compare all that comes of it."""
    assert damaged == f"step_{2 * SAVE_EVERY:06d}"
    told = " ".join(finished.output.replace("│", " ").split())
    assert re.search(rf"warning \S*{damaged} is damaged: state/__0_0\.distcp \([\d,]+ bytes\) has the SHA-256", told)
    assert f"checkpoints/step_{UNDER_WAY:06d} instead, and renames this one damaged_{damaged}" in told
    assert f"continued after step {UNDER_WAY}" in told
    assert f"damaged_{damaged}" in finished.checkpoints


def test_steps_after_the_newest_checkpoint_are_done_again(finished: Run) -> None:
    """Bug: a resumed run that appends to what the killed one had written after its checkpoint."""
    assert [record["step"] for record in finished.metrics] == list(range(STEPS + 1))


def test_metrics_equal_those_of_the_uninterrupted_run(reference: Run, finished: Run) -> None:
    """Bugs: data order that starts anew, optimizer or schedule or moving averages that are lost, weights in bf16; and
    ahead of the student a batch read twice or skipped where the run was stopped, buffers that are overwritten while
    they are read, rows of another rank, a validation that disturbs the batch under way."""
    for expected, actual in zip(reference.metrics, finished.metrics, strict=True):
        names = [name for name in expected if not name.startswith("perf/")]
        assert {name: actual.get(name) for name in names} == {name: expected[name] for name in names}, expected["step"]


def test_weights_equal_those_of_the_uninterrupted_run(reference: Run, finished: Run) -> None:
    trained, expected = (load_file(run.output_dir / "final" / "model.safetensors") for run in (finished, reference))
    for name, value in expected.items():
        assert torch.equal(trained[name], value), name


def test_closing_table_remembers_the_start(reference: Run, finished: Run) -> None:
    """Bug: a resumed run that measures the half-trained student as `before`, or not at all."""
    for name in ("student before", "teacher cross"):
        expected, actual = (
            next(line for line in run.output.splitlines() if name in line) for run in (reference, finished)
        )
        assert actual.split("│")[2] == expected.split("│")[2]


def test_finished_run_leaves_nothing(finished: Run) -> None:
    assert finished.leftovers() == []
    assert finished.checkpoints[-1] == f"step_{STEPS:06d}"
    assert len([name for name in finished.checkpoints if name.startswith("step_")]) == 2
