"""Plan of a run, complete before any process starts."""

from dataclasses import dataclass
from pathlib import Path

from nemo_opd.checkpoint.manager import Progress
from nemo_opd.cluster.placement import Placement
from nemo_opd.config.rollout import ServerRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.evaluation.groups import TokenGroups
from nemo_opd.rollout.base import BatchLimit
from nemo_opd.training.batch_grid import BatchGrid
from nemo_opd.training.benchmarks import Benchmarks
from nemo_opd.training.corpus import Corpus
from nemo_opd.training.delivery import Delivery
from nemo_opd.training.flops import Utilization
from nemo_opd.training.memory import MemoryEstimate
from nemo_opd.training.prompts import Prompts
from nemo_opd.training.questions import LoadedSet
from nemo_opd.training.sampling_batches import student_batch, student_samples, teacher_batch, teachers_answer
from nemo_opd.training.survey import DataStatistics
from nemo_opd.training.teacher_plan import TeacherPlan


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of preflight: settings, layouts, data and warnings."""

    config: RunConfig
    output_dir: Path
    progress: Progress | None
    """Progress in the checkpoint to continue from, or None in a new run."""
    damaged_steps: tuple[int, ...]
    """Steps of newer checkpoints, which are damaged."""
    checkpoint_bytes: int
    """Bytes of a checkpoint's tensors."""
    device: str
    placement: Placement
    student_layout: Layout
    teacher_layouts: tuple[Layout, ...]
    """One per active teacher."""
    deliveries: tuple[Delivery, ...]
    """One per active teacher."""
    transport: str
    student_vocab_size: int
    """Number of ids that both the student's tokenizer and its model have."""
    teachers: tuple[TeacherPlan, ...]
    """One per active teacher."""
    data: Corpus | Prompts
    questions: tuple[LoadedSet, ...]
    """Question sets of the evaluation."""
    benchmarks: Benchmarks | None
    """Benchmarks of the evaluation; None if it has none."""
    token_groups: TokenGroups | None
    """Groups of validation tokens, or None if the run has no validation or they are off."""
    survey: DataStatistics
    """Statistics of a few training texts."""
    warnings: tuple[str, ...]
    steps_per_epoch: int
    """Steps of the first epoch; an estimate if documents are packed and `train.epochs` is not set."""
    total_steps: int
    memory: MemoryEstimate
    server_share: float | None
    """Share of GPU memory for a rollout server on the training GPUs, or None if there is none or it is unknown."""
    utilization: Utilization

    @property
    def grid(self) -> BatchGrid:
        return BatchGrid(self.student_layout, self.teacher_layouts)

    @property
    def rows_per_rank(self) -> int:
        """Rows of a full batch on one data-parallel rank of the student; a row is a sequence unless packed."""
        return self.config.train.global_batch_size // self.student_layout.dp

    @property
    def teacher_tokens_at_a_time(self) -> tuple[int, ...]:
        """Tokens of a microbatch of each active teacher; by default it has as many texts as the student's.

        Servers get a whole batch at a time.
        """
        train, teachers = self.config.train, self.config.active_teachers
        return tuple(
            train.global_batch_size * width
            if settings.served is not None
            else settings.micro_batch_tokens or -(-train.tokens_at_a_time * width // train.max_length)
            for settings, width in zip(teachers, self.survey.widths, strict=True)
        )

    @property
    def sampled_end_ids(self) -> frozenset[int]:
        """Tokens that end the student's samples; empty if it samples nothing."""
        if isinstance(self.data, Prompts):
            return self.data.student.end_ids
        if self.benchmarks is not None:
            return self.benchmarks.student.end_ids
        return self.questions[0].student.end_ids if self.questions else frozenset()

    @property
    def sampled_at_once(self) -> BatchLimit | None:
        """Limit on the sequences that a student rank samples at a time; None if the workers sample nothing."""
        return student_batch(self.config, 1).limit if student_samples(self.config) else None

    @property
    def answered_at_once(self) -> tuple[BatchLimit, ...]:
        """The same limit for each active teacher; empty unless teachers answer questions."""
        teachers = self.config.active_teachers if teachers_answer(self.config) else ()
        return tuple(teacher_batch(self.config, teacher).limit for teacher in teachers)

    @property
    def empties_cache(self) -> bool:
        """Whether ranks empty PyTorch's CUDA cache for other processes on their GPU."""
        cluster, rollout = self.config.cluster, self.config.rollout
        if isinstance(rollout, ServerRollout) and rollout.shares_devices:
            return self.device == "cuda"
        shares = self.placement.groups_per_device > 1 and cluster.launcher == "ray"
        return self.device == "cuda" and shares and not self.memory.caches_fit

    @property
    def lookahead(self) -> int:
        """Batches that teachers read ahead of the student; 0 if they take turns with it on the same devices."""
        return self.config.batches_ahead
