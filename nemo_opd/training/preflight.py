"""Every check that can be made before a process starts. Each failure is one message: key, value, reason, way out."""

from datasets import Dataset

from nemo_opd.aggregation.routed import RoutedSampleMaker
from nemo_opd.config.run import RunConfig
from nemo_opd.data import layout as columns
from nemo_opd.data.documents import read_documents
from nemo_opd.data.samples import SampleMaker
from nemo_opd.data.sources import load_documents
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.handoff.transport import transport_for
from nemo_opd.training.delivery import plan_deliveries, resolve_layouts
from nemo_opd.training.layout import (
    progress_to_resume,
    require_batch_divides,
    resolve_device,
    resolve_output_dir,
    resolve_placement,
)
from nemo_opd.training.memory import Machine, Situation, settle_memory
from nemo_opd.training.plan import Plan, StudentPlan
from nemo_opd.training.sides import build_sample_maker, load_side, plan_teacher


def preflight(config: RunConfig) -> Plan:
    """Check everything and say what will run. Raises an OPDError for what cannot."""
    device = resolve_device(config.cluster)
    placement = resolve_placement(config, device)
    student_layout, teacher_layouts = resolve_layouts(config, placement)
    require_batch_divides(config, student_layout.dp, [layout.dp for layout in teacher_layouts])
    transport = transport_for(config.handoff, device)
    output_dir = resolve_output_dir(config.run)
    progress = progress_to_resume(config, output_dir)
    student = load_side(config.student, "student", device)
    teachers = [load_side(settings, f"teachers.{i}", device) for i, settings in enumerate(config.active_teachers)]
    deliveries = plan_deliveries(config, transport, placement, (student_layout, teacher_layouts), teachers)
    train_documents, validation_documents = load_data(config)
    teacher_plans = tuple(
        plan_teacher(i, settings, student, teacher)
        for i, (settings, teacher) in enumerate(zip(config.active_teachers, teachers, strict=True))
    )
    sample_maker = make_samples(config, build_sample_maker(config, student, teachers))
    require_readable(sample_maker, train_documents, "data.train")
    steps_per_epoch = -(-len(train_documents) // config.train.global_batch_size)
    machine = Machine.of_this_node(device, placement.devices_per_node, is_remote=config.cluster.address is not None)
    situation = Situation.of(
        config,
        sizes=[side.size for side in (student, *teachers)],
        vocab_sizes=[side.vocab_size for side in (student, *teachers)],
        layouts=(student_layout, *teacher_layouts),
        machine=machine,
        transport=transport,
        lookahead=config.cluster.prefetch if placement.is_separate else 0,
        headless=config.handoff.type == "hidden_states",
        gives_back=not placement.is_separate,
    )
    config, memory = settle_memory(config, situation)
    return Plan(
        config=config,
        output_dir=output_dir,
        progress=progress,
        device=device,
        placement=placement,
        student_layout=student_layout,
        teacher_layouts=teacher_layouts,
        deliveries=deliveries,
        transport=transport,
        student=StudentPlan(student.vocab_size),
        teachers=teacher_plans,
        train_documents=train_documents,
        validation_documents=validation_documents,
        sample_maker=sample_maker,
        steps_per_epoch=steps_per_epoch,
        total_steps=config.train.max_steps or (config.train.epochs or 1) * steps_per_epoch,
        memory=memory,
    )


def load_data(config: RunConfig) -> tuple[Dataset, Dataset | None]:
    layout: columns.Layout = columns.layout_of(config.data)
    if config.routing is not None:
        layout = columns.RoutedLayout(layout, config.routing.key, config.active_names)
    train = load_documents(config.data.train, layout, key="data.train")
    if not config.data.validation.given:
        return train, None
    return train, load_documents(config.data.validation, layout, key="data.validation")


def make_samples(config: RunConfig, make: SampleMaker) -> SampleMaker:
    """As `make` does, for the one teacher of each document where the data name it."""
    return make if config.routing is None else RoutedSampleMaker(make, config.active_names)


def require_readable(make_sample: SampleMaker, documents: Dataset, key: str) -> None:
    """Make the first sample. Raises DataError, naming `key`, for what would end the run at its first step."""
    try:
        make_sample(read_documents(documents, [0])[0])
    except (AlignmentError, DataError) as error:
        raise DataError(f"{key}: the first document cannot be used: {error}") from error
