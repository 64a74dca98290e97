"""Checks before any process starts. A failure is one message with the key, its value, the reason and the fix."""

from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import torch

from nemo_opd.aggregation import TrainingObjective, build_objective
from nemo_opd.checkpoint.manager import Progress
from nemo_opd.checkpoint.run_directory import checkpoints_of, progress_to_resume, require_not_beyond, resolve_output_dir
from nemo_opd.cluster.batch_grid import BatchGrid
from nemo_opd.cluster.placement import Placement
from nemo_opd.config.model import Student
from nemo_opd.config.rollout import ServerRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ConfigError
from nemo_opd.evaluation.validation import TokenGroups, token_classes
from nemo_opd.files import require_room
from nemo_opd.models.causal_model import check_head_precision
from nemo_opd.models.load import compute_dtype, load_config
from nemo_opd.preflight.corpus import Corpus, load_corpus
from nemo_opd.preflight.delivery import Delivery, arriving_bytes, check_deliveries, plan_deliveries, settle_transport
from nemo_opd.preflight.flops import Utilization, device_name, peak_flops
from nemo_opd.preflight.memory import Machine, MemoryEstimate, MemoryInputs, ModelSetup, state_bytes
from nemo_opd.preflight.memory_choices import server_share, settle_memory
from nemo_opd.preflight.model_info import (
    ModelInfo,
    ModelSize,
    has_configuration,
    read_model_info,
    tokenizers_loaded_once,
)
from nemo_opd.preflight.prompts import (
    Benchmarks,
    LoadedSet,
    Prompts,
    check_users_code,
    load_prompts,
    load_sets,
    load_tasks,
    longest_question,
    plan_benchmarks,
)
from nemo_opd.preflight.ranks import (
    require_batch_divides,
    require_processes,
    require_shared_gpus,
    resolve_device,
    resolve_layouts,
    resolve_placement,
    resolve_replicas,
    warn_of_shared_memory,
)
from nemo_opd.preflight.survey import DataStatistics, survey
from nemo_opd.preflight.teachers import TeacherPlan, check_answers, plan_teacher, require_templates, settle_tokenizers
from nemo_opd.preflight.warnings import (
    check_positions,
    check_templates,
    check_texts,
    warn_of_few_texts,
    warn_of_other_ends,
    warn_of_shared_data,
    warn_of_short_teachers,
    warn_of_spelled_tokens,
    warn_of_student_as_teacher,
)
from nemo_opd.progress import tracked, working
from nemo_opd.rollout.engine_interface import BatchLimit, student_batch, teacher_batch
from nemo_opd.workers.optimizer import check_optimizer


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
    def started_from(self) -> str | None:
        """As in `Progress`."""
        return None if self.progress is None else self.progress.started_from

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
        batch = student_batch(self.config, 1)
        return None if batch is None else batch.limit

    @property
    def answered_at_once(self) -> tuple[BatchLimit, ...]:
        """The same limit for each active teacher; empty unless teachers answer questions."""
        batches = (teacher_batch(self.config, teacher) for teacher in self.config.active_teachers)
        return tuple(batch.limit for batch in batches if batch is not None)

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


@tokenizers_loaded_once()
def preflight(config: RunConfig) -> Plan:
    """Check everything and return the run's plan. Raises an OPDError if the run cannot start."""
    device = resolve_device(config.cluster)
    config = settle_tokenizers(config, device)
    placement = resolve_placement(config, device)
    require_processes(config.cluster, placement, device)
    require_shared_gpus(config, device, placement)
    student_layout, teacher_layouts = resolve_layouts(config, placement)
    check_optimizer(config.student.optimizer, student_layout.size)
    require_batch_divides(config, student_layout.dp, [layout.dp for layout in teacher_layouts])
    output_dir = resolve_output_dir(config.run)
    resumed = progress_to_resume(config, output_dir)
    check_users_code(config)
    tasks = load_tasks(config)
    student, teachers = _read_models(config, device)
    require_templates(config, student, teachers)
    checkpoint_bytes = _require_room_to_save(config, student.size, output_dir)
    warnings = [] if resumed is None else [*resumed.warnings(checkpoints_of(config, output_dir))]
    warnings += [*check_positions(config, student, teachers), *warn_of_other_ends(config, student, teachers)]
    check_deliveries(config, placement, (student_layout, teacher_layouts), teachers, device)
    teacher_plans = tuple(
        plan_teacher(config, i, student, teacher)
        for i, teacher in enumerate(tracked(teachers, "comparing vocabularies", "teachers"))
    )
    data = (load_corpus if config.rollout is None else load_prompts)(config, student, teachers)
    questions = load_sets(config, student, teachers)
    benchmarks = plan_benchmarks(config, tasks, student, teachers)
    objective = build_objective(
        config,
        [teacher.projection for teacher in teacher_plans],
        student_vocab_size=student.vocab_size,
        teacher_vocab_sizes=[teacher.vocab_size for teacher in teacher_plans],
    )
    check_answers(config, device, teachers, objective, student.size.vocab_size)
    warnings += warn_of_shared_data(config)
    warnings += check_templates(config, data, student, teachers)
    statistics = survey(config, data, student, teachers, objective, [teacher.projection for teacher in teacher_plans])
    warnings += check_texts(config, statistics)
    num_samples = _packed_rows(config, data, statistics) if config.packs_documents else len(data.train)
    warnings += [*warn_of_few_texts(config, num_samples), *warn_of_student_as_teacher(config)]
    if isinstance(data, Corpus):
        warnings += warn_of_spelled_tokens(config, data, student)
    if config.packs_documents:
        warnings += warn_of_short_teachers(config, teachers, statistics)
    deliveries = plan_deliveries(
        config, placement, (student_layout, teacher_layouts), teachers, device, lengths=statistics.widths
    )
    transport, remarks = settle_transport(config, device, deliveries)
    warnings += remarks
    if config.cluster.address is None:
        warnings += warn_of_shared_memory(device, (student_layout, *teacher_layouts), placement.num_nodes)
    steps = _steps(config, data, statistics)
    total_steps = config.train.max_steps or sum(steps)
    if resumed is not None:
        require_not_beyond(resumed.progress.step, total_steps, output_dir)
    machine = Machine.of_this_node(device, placement.devices_per_node, is_remote=config.cluster.address is not None)
    stretches = [Fraction(width, config.train.max_length) for width in statistics.widths]
    situation = MemoryInputs(
        ModelSetup(student.size, student.vocab_size, student_layout, longest_question=longest_question(benchmarks)),
        tuple(
            ModelSetup(teacher.size, teacher.vocab_size, layout, stretch, longest_question(benchmarks, i))
            for i, (teacher, layout, stretch) in enumerate(zip(teachers, teacher_layouts, stretches, strict=True))
        ),
        machine,
        arriving_bytes(deliveries, 1 + config.batches_ahead),
        through_host=transport == "pinned_memory",
        num_learned=sum(teacher.num_learned for teacher in teacher_plans),
    )
    config, situation = resolve_replicas(config, situation, placement)
    config, memory = settle_memory(config, situation)
    return Plan(
        config=config,
        output_dir=output_dir,
        progress=None if resumed is None else resumed.progress,
        damaged_steps=() if resumed is None else tuple(resumed.damaged),
        checkpoint_bytes=checkpoint_bytes,
        device=device,
        placement=placement,
        student_layout=situation.student.layout,
        teacher_layouts=tuple(teacher.layout for teacher in situation.teachers),
        deliveries=deliveries,
        transport=transport,
        student_vocab_size=student.vocab_size,
        teachers=teacher_plans,
        data=data,
        questions=questions,
        benchmarks=benchmarks,
        token_groups=_token_groups(config, student, data, objective),
        survey=statistics,
        warnings=tuple(warnings),
        steps_per_epoch=steps[0],
        total_steps=total_steps,
        memory=memory,
        server_share=server_share(config, memory, machine),
        utilization=Utilization(
            student.computed_size,
            tuple(
                teacher.computed_size if settings.is_computed else None
                for teacher, settings in zip(teachers, config.active_teachers, strict=True)
            ),
            len(placement.devices),
            peak_flops(device_name(device)),
        ),
    )


def _token_groups(
    config: RunConfig, student: ModelInfo, data: Corpus | Prompts, objective: TrainingObjective
) -> TokenGroups | None:
    """Return the groups of validation tokens, or None if the run has no validation or they are off."""
    if data.validation is None or not config.logging.token_groups:
        return None
    return TokenGroups(
        teachers=config.active_names,
        parts=tuple((part.name, part.teacher) for part in objective.parts),
        classes=torch.from_numpy(token_classes(student.pieces)),
        domains=() if data.domains is None else data.domains.names,
    )


def _steps(config: RunConfig, data: Corpus | Prompts, statistics: DataStatistics) -> list[int]:
    """Return the steps of each epoch.

    Packed documents without `train.epochs`: one entry, estimated from the sampled texts.
    """
    if config.train.epochs is not None or not config.packs_documents:
        return data.steps(config)
    return [max(1, round(_packed_rows(config, data, statistics) / config.train.global_batch_size))]


def _packed_rows(config: RunConfig, data: Corpus | Prompts, statistics: DataStatistics) -> int:
    """Estimate the packed rows of an epoch from the sampled texts."""
    assert isinstance(data, Corpus), "prompts are not packed"
    return max(1, round(data.text_bytes * statistics.tokens_per_byte[0] / config.train.max_length))


def _read_models(config: RunConfig, device: str) -> tuple[ModelInfo, list[ModelInfo]]:
    """Read the student and each active teacher. Raises ModelError for a model that the run cannot use."""
    with working("reading the student's tokenizer"):
        student = read_model_info(config.student, "student", device)
    teachers = [
        read_model_info(settings, f"teachers.{i}", device)
        for i, settings in enumerate(tracked(config.active_teachers, "reading the teachers' tokenizers", "teachers"))
    ]
    # A teacher with the student's weights has its adapters, too.
    teachers = [
        replace(teacher, size=student.size) if settings.is_student else teacher
        for settings, teacher in zip(config.active_teachers, teachers, strict=True)
    ]
    keys = ["student", *(f"teachers.{i}" for i in range(len(teachers)))]
    for key, settings in zip(keys, (config.student, *config.active_teachers), strict=True):
        if not has_configuration(settings):
            continue
        model = load_config(settings.reference, key=f"{key}.model")
        check_head_precision(model, compute_dtype(settings.dtype, device), key=key, reference=settings.reference)
    return student, teachers


def _require_room_to_save(config: RunConfig, student: ModelSize, output_dir: Path) -> int:
    """Return the bytes of a checkpoint's tensors.

    Raises ConfigError if the disk has no room for one checkpoint and the trained model.
    """
    exported = _exported_bytes(config.student, student)
    averages = sum(teacher.weights == "ema" for teacher in config.active_teachers)
    weights = (1 + averages) * torch.float32.itemsize * student.trained_parameters
    checkpoint = weights + state_bytes(config.student.optimizer, student, Layout(1)) + exported
    require_room(
        output_dir,
        checkpoint + exported,
        "one checkpoint and the trained model",
        instead="choose another run.output_dir",
        kind=ConfigError,
    )
    return checkpoint


def _exported_bytes(student: Student, size: ModelSize) -> int:
    """Return the size of the exported Hugging Face folder in bytes."""
    if student.lora is not None and student.lora.export == "adapter":
        return size.trained_parameters * torch.float32.itemsize
    dtype = load_config(student.model, key="student.model").dtype
    return size.parameters * (dtype if isinstance(dtype, torch.dtype) else torch.float32).itemsize
