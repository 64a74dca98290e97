"""What a run will do, settled before any process starts."""

from dataclasses import dataclass
from pathlib import Path

from nemo_opd.checkpoint.manager import Progress
from nemo_opd.cluster.placement import Placement
from nemo_opd.config.run import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.handoff.plan import Readers, Sides
from nemo_opd.handoff.traffic import Traffic
from nemo_opd.training.batch_grid import BatchGrid
from nemo_opd.training.corpus import Corpus
from nemo_opd.training.memory import MemoryEstimate
from nemo_opd.training.prompts import Prompts
from nemo_opd.training.sides import TeacherPlan
from nemo_opd.training.survey import Survey


@dataclass(frozen=True, slots=True)
class StudentPlan:
    vocab_size: int
    """Of the tokenizer: largest id + 1."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """From the ranks of a teacher to those of the student."""

    sides: Sides
    readers: tuple[Readers, ...]
    """By rank of the teacher."""
    traffic: tuple[Traffic, ...]
    """By rank of the student: what is sent to it from other nodes."""

    @property
    def crosses_nodes(self) -> bool:
        return any(self.traffic)


@dataclass(frozen=True, slots=True)
class Plan:
    config: RunConfig
    output_dir: Path
    progress: Progress | None
    """Where the run continues; None where it starts anew."""
    damaged_steps: tuple[int, ...]
    """Of newer checkpoints, which are not whole."""
    checkpoint_bytes: int
    """Of the weights and moments in one, which has a little more."""
    device: str
    placement: Placement
    student_layout: Layout
    teacher_layouts: tuple[Layout, ...]
    """One per active teacher."""
    deliveries: tuple[Delivery, ...]
    """One per active teacher."""
    transport: str
    student: StudentPlan
    teachers: tuple[TeacherPlan, ...]
    """One per active teacher."""
    data: Corpus | Prompts
    survey: Survey
    """Of a few of the training texts."""
    warnings: tuple[str, ...]
    """What is suspicious, in sentences."""
    steps_per_epoch: int
    total_steps: int
    memory: MemoryEstimate

    @property
    def grid(self) -> BatchGrid:
        return BatchGrid(self.student_layout, self.teacher_layouts, self.config.train.micro_batch_size)

    @property
    def rows_per_rank(self) -> int:
        """Sequences of a full batch on one rank of the student."""
        return self.config.train.global_batch_size // self.student_layout.dp

    @property
    def lookahead(self) -> int:
        """Batches that the teachers are ahead of the student; none where they take turns on the same devices."""
        return self.config.cluster.prefetch if self.placement.is_separate else 0
