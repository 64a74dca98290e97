"""The example with other workers, as the first argument says.

`teacher_raises`, `student_hangs`: in the third step. `all_slow`: a step takes either half SLOW_S more.
"""

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

    def forward(self, tokens: TokenRows, slot: int = 0) -> Scored:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("the teacher has left the room")
        return super().forward(tokens, slot)


class HangingStudent(StudentWorker):
    """Leaves its process id in the run directory."""

    calls = 0

    def train_step(self, step: StudentStep) -> dict[str, Metric]:
        self.calls += 1
        if self.calls == 3:
            (self.config.run.output_dir / "hanging").write_text(str(os.getpid()))
            time.sleep(3600)
        return super().train_step(step)


SLOW_S = 0.2
"""In sleep, which needs no processor, and which no worker counts as its own time."""


class SlowTeacher(TeacherWorker):
    def forward(self, tokens: TokenRows, slot: int = 0) -> Scored:
        time.sleep(SLOW_S)
        return super().forward(tokens, slot)


class SlowStudent(StudentWorker):
    def train_step(self, step: StudentStep) -> dict[str, Metric]:
        time.sleep(SLOW_S)
        return super().train_step(step)


OTHERS = {
    "teacher_raises": (RaisingTeacher, StudentWorker),
    "student_hangs": (TeacherWorker, HangingStudent),
    "all_slow": (SlowTeacher, SlowStudent),
}

if __name__ == "__main__":
    models.TeacherWorker, models.StudentWorker = OTHERS[sys.argv.pop(1)]
    main(distil, config_dir=CONFIGS, config_name="off_policy_demo")
