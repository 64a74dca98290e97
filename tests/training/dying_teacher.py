"""The example with a teacher process that dies in a forward pass, before its second layer."""

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from nemo_opd.cli.settings_verbs import main
from nemo_opd.config.run import RunConfig
from nemo_opd.training import groups
from nemo_opd.training.off_policy import distil
from nemo_opd.types import TokenRows
from nemo_opd.workers.teacher_worker import TeacherOutput, TeacherWorker
from tests.training.faulty_rank import die

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RANK, CALL = 1, 4
"""The rank that dies, of two, and the batch that it dies in."""


class DyingTeacher(TeacherWorker):
    """A teacher that dies; its second rank then waits for the layer's parameters."""

    calls = 0

    def forward(self, tokens: TokenRows, micro_batches: Sequence[slice], slot: int = 0) -> TeacherOutput:
        self.calls += 1
        if dist.get_world_size() > 1 and dist.get_rank() == RANK and self.calls == CALL:
            self.model.get_submodule("model.layers.1").register_forward_pre_hook(lambda *_: die())
        return super().forward(tokens, micro_batches, slot)


if __name__ == "__main__":
    groups.TeacherWorker = DyingTeacher
    main(distil, RunConfig, config_dir=CONFIGS, config_name="off_policy_demo")
