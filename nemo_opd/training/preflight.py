"""Every check that can be made before a process starts. Each failure is one message: key, value, reason, way out."""

from datasets import Dataset

from nemo_opd.aggregation.routed import RoutedSampleMaker
from nemo_opd.config.run import RunConfig
from nemo_opd.data.documents import read_documents
from nemo_opd.data.layout import Layout, RoutedLayout, layout_of
from nemo_opd.data.samples import SampleMaker
from nemo_opd.data.sources import load_documents
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.handoff.transport import transport_for
from nemo_opd.training.layout import (
    progress_to_resume,
    require_batch_divides,
    resolve_device,
    resolve_output_dir,
    resolve_ranks,
)
from nemo_opd.training.memory import estimate
from nemo_opd.training.plan import Plan, StudentPlan
from nemo_opd.training.sides import build_sample_maker, load_side, plan_teacher


def preflight(config: RunConfig) -> Plan:
    """Check everything and say what will run. Raises an OPDError for what cannot."""
    device = resolve_device(config.cluster)
    num_ranks = resolve_ranks(config.cluster, device)
    require_batch_divides(config, num_ranks)
    transport = transport_for(config.handoff, device)
    output_dir = resolve_output_dir(config.run)
    progress = progress_to_resume(config, output_dir)
    student = load_side(config.student, "student")
    teachers = [load_side(settings, f"teachers.{i}") for i, settings in enumerate(config.active_teachers)]
    train_documents, validation_documents = load_data(config)
    teacher_plans = tuple(
        plan_teacher(i, settings, student, teacher)
        for i, (settings, teacher) in enumerate(zip(config.active_teachers, teachers, strict=True))
    )
    sample_maker = make_samples(config, build_sample_maker(config, student, teachers))
    require_readable(sample_maker, train_documents, "data.train")
    steps_per_epoch = -(-len(train_documents) // config.train.global_batch_size)
    return Plan(
        config=config,
        output_dir=output_dir,
        progress=progress,
        device=device,
        num_ranks=num_ranks,
        transport=transport,
        student=StudentPlan(student.vocab_size),
        teachers=teacher_plans,
        train_documents=train_documents,
        validation_documents=validation_documents,
        sample_maker=sample_maker,
        steps_per_epoch=steps_per_epoch,
        total_steps=config.train.max_steps or (config.train.epochs or 1) * steps_per_epoch,
        memory=estimate(
            config,
            student.size,
            [teacher.size for teacher in teachers],
            num_ranks=num_ranks,
            compute_bytes=4 if device == "cpu" else 2,
        ),
    )


def load_data(config: RunConfig) -> tuple[Dataset, Dataset | None]:
    layout: Layout = layout_of(config.data)
    if config.routing is not None:
        layout = RoutedLayout(layout, config.routing.key, config.active_names)
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
