"""The example with a student that dies while it writes a checkpoint, whose step is the first argument."""

import sys
from pathlib import Path

from nemo_opd.training import models
from nemo_opd.training.cli import main
from nemo_opd.training.off_policy import distil
from nemo_opd.workers.student import StudentWorker
from tests.training.faulty_rank import die

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


class DyingWriter(StudentWorker):
    """Leaves a checkpoint half written."""

    last = "no checkpoint"

    def save(self, folder: Path) -> None:
        super().save(folder)
        if folder.name.endswith(self.last):
            die()


if __name__ == "__main__":
    DyingWriter.last = f"_{int(sys.argv.pop(1)):06d}"
    models.StudentWorker = DyingWriter
    main(distil, config_dir=CONFIGS, config_name="off_policy_demo")
