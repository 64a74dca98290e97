"""Every check that can be made before a process starts. Each failure is one message: key, value, reason, way out."""

import os
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from nemo_opd.alignment import TokenAligner, pieces_of
from nemo_opd.checkpoint.identity import newest_of_same_run
from nemo_opd.checkpoint.manager import CheckpointManager
from nemo_opd.cluster.virtual_cluster import num_cores
from nemo_opd.config.cluster import Cluster
from nemo_opd.config.model import Student
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher, Teacher
from nemo_opd.data.samples import CrossTokenizer, Encoder, SameTokenizer, SampleMaker
from nemo_opd.data.sources import load_documents
from nemo_opd.errors import ConfigError, ModelError, ProjectionError
from nemo_opd.handoff.transport import transport_for
from nemo_opd.models.load import load_config, load_tokenizer
from nemo_opd.projection import ProjectionMatrix, audit, cached_projection
from nemo_opd.training.memory import ModelSize, estimate, model_size
from nemo_opd.training.plan import Plan, StudentPlan, TeacherPlan


def preflight(config: RunConfig) -> Plan:
    """Check everything and say what will run. Raises an OPDError for what cannot."""
    device = resolve_device(config.cluster)
    num_ranks = resolve_ranks(config.cluster, device)
    require_batch_divides(config, num_ranks)
    transport = transport_for(config.handoff, device)
    output_dir = resolve_output_dir(config)
    student_size, student = check_model(config.student, "student")
    checked = [check_model(teacher, f"teachers.{i}") for i, teacher in enumerate(config.active_teachers)]
    sizes, tokenizers = [size for size, _ in checked], [tokenizer for _, tokenizer in checked]
    train_documents, validation_documents = load_data(config)
    teachers = tuple(
        plan_teacher(i, teacher, student, tokenizer, size)
        for i, (teacher, (size, tokenizer)) in enumerate(zip(config.active_teachers, checked, strict=True))
    )
    steps_per_epoch = -(-len(train_documents) // config.train.global_batch_size)
    return Plan(
        config=config,
        output_dir=output_dir,
        device=device,
        num_ranks=num_ranks,
        transport=transport,
        student=StudentPlan(pieces_of(student).vocab_size),
        teachers=teachers,
        train_documents=train_documents,
        validation_documents=validation_documents,
        sample_maker=build_sample_maker(config, student, tokenizers),
        steps_per_epoch=steps_per_epoch,
        total_steps=config.train.max_steps or (config.train.epochs or 1) * steps_per_epoch,
        memory=estimate(config, student_size, sizes, num_ranks=num_ranks, compute_bytes=4 if device == "cpu" else 2),
    )


def resolve_device(cluster: Cluster) -> str:
    if cluster.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if cluster.device == "cuda" and not torch.cuda.is_available() and cluster.address is None:
        raise ConfigError(
            "cluster.device=cuda: PyTorch sees no GPU on this machine; write cluster.device=cpu, or cluster.address of "
            "a Ray cluster with GPUs"
        )
    return cluster.device


def resolve_ranks(cluster: Cluster, device: str) -> int:
    """Data-parallel ranks. Raises ConfigError where this machine has too few cores or GPUs."""
    if cluster.num_nodes > 1 and cluster.address is None:
        raise ConfigError(
            f"cluster.num_nodes={cluster.num_nodes}: several nodes need a running Ray cluster; start it with "
            "`ray start` on each node and write cluster.address=auto"
        )
    if device == "cpu":
        if cluster.address is None and cluster.cpu_ranks > num_cores():
            raise ConfigError(
                f"cluster.cpu_ranks={cluster.cpu_ranks}: this machine has {num_cores()} cores; write "
                f"cluster.cpu_ranks={num_cores()} or fewer"
            )
        return cluster.cpu_ranks
    visible = torch.cuda.device_count()
    if cluster.gpus_per_node is None and not visible:
        raise ConfigError(
            "cluster.gpus_per_node: this machine has no GPU to count; say how many each node of the Ray cluster has"
        )
    gpus = cluster.gpus_per_node or visible
    if cluster.address is None and gpus > visible:
        raise ConfigError(
            f"cluster.gpus_per_node={gpus}: this machine has {visible}; write cluster.gpus_per_node={visible} or fewer"
        )
    return cluster.num_nodes * gpus


def require_batch_divides(config: RunConfig, num_ranks: int) -> None:
    size, micro = config.train.global_batch_size, config.train.micro_batch_size
    unit = num_ranks * micro
    if size % unit:
        nearest = max(unit, size // unit * unit)
        raise ConfigError(
            f"train.global_batch_size={size} does not divide into {num_ranks} ranks × train.micro_batch_size={micro}; "
            f"write train.global_batch_size={nearest}, or change the microbatch or the number of ranks"
        )


def resolve_output_dir(config: RunConfig) -> Path:
    """The run's directory, not yet created.

    Raises ConfigError where it cannot be written or holds a run that is not to be continued, and CheckpointError where
    it is to be continued and cannot be.
    """
    run = config.run
    folder = run.output_dir or default_output_dir(run.name)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise ConfigError(
            f"run.output_dir={folder}: {existing} is not writable ({reason}); name another directory, or change its "
            "permissions"
        ) from error
    checkpoints = CheckpointManager(folder / "checkpoints", config.train.keep_last)
    steps = checkpoints.steps()
    if run.resume == "auto":
        newest_of_same_run(checkpoints, config)
    elif steps:
        raise ConfigError(
            f"run.output_dir={folder} holds a run with a checkpoint at step {steps[-1]}; write run.resume=auto to "
            "continue it, or another run.output_dir"
        )
    return folder


def default_output_dir(name: str) -> Path:
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path("outputs") / name / stamp
    for number in range(1, 1000):
        if not folder.exists():
            break
        folder = folder.with_name(f"{stamp}_{number}")
    return folder


def check_model(settings: Student | Teacher, key: str) -> tuple[ModelSize, PreTrainedTokenizerFast]:
    """Size and tokenizer. Raises ModelError where one is not readable or the model has too few token embeddings."""
    size = model_size(load_config(settings.model, key=f"{key}.model"))
    source, source_key = settings.tokenizer or settings.model, f"{key}.{'tokenizer' if settings.tokenizer else 'model'}"
    tokenizer = load_tokenizer(source, key=source_key)
    vocab_size = pieces_of(tokenizer).vocab_size
    if vocab_size > size.vocab_size:
        raise ModelError(
            f"{source_key}={source}: its tokenizer has ids up to {vocab_size - 1}, but {settings.model} has "
            f"{size.vocab_size} token embeddings; name the tokenizer of the model as {key}.tokenizer"
        )
    return size, tokenizer


def load_data(config: RunConfig) -> tuple[Dataset, Dataset | None]:
    train = load_documents(config.data.train, config.data.text_key, key="data.train")
    if not config.data.validation.given:
        return train, None
    return train, load_documents(config.data.validation, config.data.text_key, key="data.validation")


def plan_teacher(
    i: int,
    settings: Teacher,
    student: PreTrainedTokenizerFast,
    tokenizer: PreTrainedTokenizerFast,
    size: ModelSize,
) -> TeacherPlan:
    vocab_size = pieces_of(tokenizer).vocab_size
    if not isinstance(settings, CrossTokenizerTeacher):
        require_same_tokenizer(i, settings, student, tokenizer)
        require_room_for_ids(i, settings, pieces_of(student).vocab_size, size)
        return TeacherPlan(vocab_size, None, None)
    matrix = load_projection(i, settings, student, tokenizer)
    return TeacherPlan(vocab_size, matrix, audit(student, tokenizer, matrix))


def load_projection(
    i: int, settings: CrossTokenizerTeacher, student: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast
) -> ProjectionMatrix:
    """Raises ProjectionError naming the key where the file given is not of this pair or not readable."""
    if settings.projection == "auto":
        matrix, _ = cached_projection(student, tokenizer, settings.top_k)
        return matrix
    try:
        return ProjectionMatrix.load(settings.projection, student_tokenizer=student, teacher_tokenizer=tokenizer)
    except ProjectionError as error:
        raise ProjectionError(f"teachers.{i}.projection: {error}") from error


def require_same_tokenizer(
    i: int, settings: Teacher, student: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Raises ModelError where a token of both has two ids, or an id of both is two tokens."""
    ours, theirs = student.get_vocab(), tokenizer.get_vocab()
    by_id = {index: token for token, index in theirs.items()}
    differing = [
        f"{token!r} is {index} and {theirs[token]}" if token in theirs else f"{index} is {token!r} and {by_id[index]!r}"
        for token, index in sorted(ours.items(), key=lambda item: item[1])
        if theirs.get(token, index) != index or by_id.get(index, token) != token
    ]
    if differing:
        raise ModelError(
            f"teachers.{i}.type=same_tokenizer: the tokenizer of {settings.name} differs from the student's in "
            f"{len(differing)} of {len(ours)} tokens ({'; '.join(differing[:2])}); write type: cross_tokenizer"
        )


def require_room_for_ids(i: int, settings: Teacher, student_vocab_size: int, size: ModelSize) -> None:
    """Raises ModelError where the student's tokenizer has ids that the teacher cannot read."""
    if student_vocab_size > size.vocab_size:
        raise ModelError(
            f"teachers.{i}.type=same_tokenizer: {settings.name} has {size.vocab_size} token embeddings, but the "
            f"student's tokenizer has ids up to {student_vocab_size - 1}; write type: cross_tokenizer"
        )


def build_sample_maker(
    config: RunConfig, student: PreTrainedTokenizerFast, tokenizers: Sequence[PreTrainedTokenizerFast]
) -> SampleMaker:
    def side(settings: Teacher, tokenizer: PreTrainedTokenizerFast) -> SameTokenizer | CrossTokenizer:
        if not isinstance(settings, CrossTokenizerTeacher):
            return SameTokenizer()
        max_length = settings.max_length or config.train.max_length
        return CrossTokenizer(
            Encoder.of(tokenizer, max_length, config.data.append_eos), TokenAligner(student, tokenizer)
        )

    teachers = tuple(map(side, config.active_teachers, tokenizers))
    return SampleMaker(Encoder.of(student, config.train.max_length, config.data.append_eos), teachers)
