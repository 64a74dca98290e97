"""The example with faulty workers: `faulty_workers.py FAULT STEP OVERRIDES`, with steps counted from the run's start.

`teacher_raises`; `student_hangs` until it is released; `all_slow`: the student hangs too, and in every step teacher
and student sleep SLOW_S each.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from nemo_opd.cli.settings_verbs import main
from nemo_opd.config.run import RunConfig
from nemo_opd.training import groups
from nemo_opd.training.off_policy import distil
from nemo_opd.types import Metric, TokenRows
from nemo_opd.workers.step import StudentStep
from nemo_opd.workers.student_worker import StudentWorker
from nemo_opd.workers.teacher_worker import TeacherOutput, TeacherWorker
from tests.training.launch import MARK, hanging

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


class RaisingTeacher(TeacherWorker):
    at = calls = 0

    def forward(self, tokens: TokenRows, micro_batches: Sequence[slice], slot: int = 0) -> TeacherOutput:
        self.calls += 1
        if self.calls == self.at:
            raise RuntimeError("the teacher has left the room")
        return super().forward(tokens, micro_batches, slot)


class HangingStudent(StudentWorker):
    """A student that hangs as long as the file with its process id exists."""

    at = calls = 0

    def train_step(self, step: StudentStep) -> dict[str, Metric]:
        self.calls += 1
        if self.calls == self.at:
            file = hanging(self.config.run.output_dir, os.environ[MARK])
            file.write_text(str(os.getpid()))
            while file.exists():
                time.sleep(0.01)
        return super().train_step(step)


SLOW_S = 0.2
"""Sleep needs no processor, and no worker counts it as its compute time."""


class SlowTeacher(TeacherWorker):
    def forward(self, tokens: TokenRows, micro_batches: Sequence[slice], slot: int = 0) -> TeacherOutput:
        time.sleep(SLOW_S)
        return super().forward(tokens, micro_batches, slot)


class SlowStudent(HangingStudent):
    def train_step(self, step: StudentStep) -> dict[str, Metric]:
        time.sleep(SLOW_S)
        return super().train_step(step)


WORKERS = {
    "teacher_raises": (RaisingTeacher, StudentWorker),
    "student_hangs": (TeacherWorker, HangingStudent),
    "all_slow": (SlowTeacher, SlowStudent),
}

if __name__ == "__main__":
    del __file__  # otherwise processes of the loader run this file, with all imports
    groups.TeacherWorker, groups.StudentWorker = WORKERS[sys.argv.pop(1)]
    RaisingTeacher.at = HangingStudent.at = int(sys.argv.pop(1))
    sys.exit(main(distil, RunConfig, config_dir=CONFIGS, config_name="off_policy_demo"))
