"""A run whose student takes turns with an environment, and samples on a server while it trains."""

import json
import sys

import pytest

from nemo_opd.cli.main import ENDED_EARLY
from tests.rollout import fake_server
from tests.tiny import Tiny
from tests.training.launch import ROOT, Run, start
from tests.training.templates import STUDENT, TEACHER

pytestmark = pytest.mark.server

SCRIPT = ROOT / "examples" / "run_on_policy_distillation.py"
ALARM_AFTER = 2
PLANTED = "planted-key-0f6d9a"


@pytest.fixture(scope="module")
def stopped(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that an alarm ended, since the fake server's log-probabilities are not the student's."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "student.jinja").write_text(STUDENT)
    (folder / "teacher.jinja").write_text(TEACHER)
    lines = [json.dumps({"chat": [{"role": "user", "content": f"fox {i}?"}]}) for i in range(8)]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    patch = pytest.MonkeyPatch()
    patch.setenv("A_KEY_OF_THIS_TEST", PLANTED)
    run = start(
        folder / "run",
        [
            "cluster.launcher=local",
            f"student.model={tiny.student}",
            f"++student.chat_template={folder / 'student.jinja'}",
            "teachers=arithmetic_multi",
            f"teachers.0.model={tiny.teacher_cross}",
            f"++teachers.0.chat_template={folder / 'teacher.jinja'}",
            f"teachers.1.model={tiny.teacher_same}",
            "data=questions",
            f"++data.train.jsonl_files={folder / 'chats.jsonl'}",
            "data.messages_key=chat",
            "evaluation=null",
            "rollout=server",
            f"rollout.command=[{sys.executable},{fake_server.__file__}]",
            "++rollout.environment.FAKE=ends",
            "++rollout.environment.HF_TOKEN=${oc.env:A_KEY_OF_THIS_TEST}",
            "++rollout.staleness=1",
            "++rollout.overlap=true",
            "rollout.n=2",
            "rollout.max_new_tokens=8",
            "++environment.type=function",
            "++environment.function=tests.training.answers_back:AnswersBack",
            "reward=environment",
            "++reward.weighting_beta=1",
            "loss=tcad",
            "loss.power_alpha=null",
            "++teachers.0.loss.type=p_kl",
            "++health.action=stop",
            f"++health.patience={ALARM_AFTER}",
            "train.max_steps=6",
            "train.global_batch_size=4",
            "train.micro_batch_size=4",
            "train.max_length=96",
            "train.save_every=null",
        ],
        script=SCRIPT,
    )
    patch.undo()
    run.wait_for_step(1)
    run.processes()
    assert run.end() == ENDED_EARLY, run.output
    assert run.leftovers() == []
    return run


def test_turns_and_weights_that_are_a_step_old(stopped: Run) -> None:
    first, *later = stopped.metrics

    assert first["rollout/staleness"] == 0
    assert all(record["rollout/staleness"] == 1 for record in later)
    for record in stopped.metrics:
        assert record["rollout/turns"] == 2
        assert record["rollout/reward_max"] == 1
        assert record["train/kd/cross"] > 0
        assert record["train/kd/same"] > 0


def test_an_alarm_saves_and_ends_the_run(stopped: Run) -> None:
    assert len(stopped.metrics) == ALARM_AFTER
    assert stopped.checkpoints == [f"step_{ALARM_AFTER:06d}"]
    assert "engine and trainer disagree" in stopped.output
    assert "run.resume=auto" in stopped.last_line


def test_a_secret_is_in_no_file_output_or_command(stopped: Run) -> None:
    """Bug: a secret in a file that is kept or sent to a tracker, in a log, or in a command line, which `ps` shows."""
    files = [file for file in stopped.output_dir.parent.rglob("*") if file.is_file()]
    assert {"config.yaml", "server.log", "metrics.jsonl", "provenance.json"} <= {file.name for file in files}
    lines = [line for file in files for line in file.read_bytes().splitlines()]
    # The fake server prints its environment, which holds the key.
    assert [line for line in lines if PLANTED.encode() in line and not line.startswith(b"environment:")] == []
    assert any("fake_server" in command for command in stopped.seen.values())
    assert PLANTED not in stopped.output + " ".join(stopped.seen.values())
