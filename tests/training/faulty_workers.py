"""The example with workers that break in the third step: `teacher_raises` or `student_hangs`, as the first argument."""

import os
import sys
import time
from pathlib import Path

from nemo_opd.training import models
from nemo_opd.training.cli import main
from nemo_opd.training.off_policy import distil
from nemo_opd.types import Metric, TokenRows
from nemo_opd.workers.student import StudentStep, StudentWorker
from nemo_opd.workers.teacher import Scored, TeacherWorker

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


class RaisingTeacher(TeacherWorker):
    calls = 0

    def forward(self, tokens: TokenRows) -> Scored:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("the teacher has left the room")
        return super().forward(tokens)


class HangingStudent(StudentWorker):
    """Leaves its process id in the run directory."""

    calls = 0

    def train_step(self, step: StudentStep) -> dict[str, Metric]:
        self.calls += 1
        if self.calls == 3:
            (self.config.run.output_dir / "hanging").write_text(str(os.getpid()))
            time.sleep(3600)
        return super().train_step(step)


if __name__ == "__main__":
    if sys.argv.pop(1) == "teacher_raises":
        models.TeacherWorker = RaisingTeacher
    else:
        models.StudentWorker = HangingStudent
    main(distil, config_dir=CONFIGS, config_name="off_policy_demo")
