"""What a run will do, settled before any process starts."""

from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset

from nemo_opd.checkpoint.manager import Progress
from nemo_opd.config.run import RunConfig
from nemo_opd.data.samples import SampleMaker
from nemo_opd.projection import Audit, ProjectionMatrix
from nemo_opd.training.memory import MemoryEstimate


@dataclass(frozen=True, slots=True)
class StudentPlan:
    vocab_size: int
    """Of the tokenizer: largest id + 1."""


@dataclass(frozen=True, slots=True)
class TeacherPlan:
    vocab_size: int
    projection: ProjectionMatrix | None
    """None where the teacher shares the student's tokenizer."""
    audit: Audit | None


@dataclass(frozen=True, slots=True)
class Plan:
    config: RunConfig
    output_dir: Path
    progress: Progress | None
    """Where the run continues; None where it starts anew."""
    device: str
    num_ranks: int
    transport: str
    student: StudentPlan
    teachers: tuple[TeacherPlan, ...]
    """One per active teacher."""
    train_documents: Dataset
    validation_documents: Dataset | None
    sample_maker: SampleMaker
    steps_per_epoch: int
    total_steps: int
    memory: MemoryEstimate

    @property
    def rows_per_rank(self) -> int:
        """Sequences of a full batch on one rank."""
        return self.config.train.global_batch_size // self.num_ranks
