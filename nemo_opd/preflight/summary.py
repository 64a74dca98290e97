"""Summary of a run before it starts, and the report of a dry run."""

import re
from collections.abc import Collection, Iterable, Iterator, Sized
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_opd.config.data import Data
from nemo_opd.config.loss import LossTerm
from nemo_opd.config.objective import GRPOLoss, Loss, Objective
from nemo_opd.config.secrets import without_secrets
from nemo_opd.config.teacher import Teacher
from nemo_opd.distributed.layout import Layout
from nemo_opd.distributed.process_group import BACKENDS
from nemo_opd.errors import ConfigError
from nemo_opd.handoff.slices import Traffic
from nemo_opd.logging.interface import RunSummary, TeacherSummary, loss_name
from nemo_opd.logging.terminal import print_warning
from nemo_opd.preflight.corpus import Corpus
from nemo_opd.preflight.flops import device_name
from nemo_opd.preflight.memory_choices import memory_report, peak_text
from nemo_opd.preflight.plan import Plan
from nemo_opd.preflight.prompts import Prompts
from nemo_opd.preflight.survey import DataStatistics
from nemo_opd.projection.build import fit_warnings
from nemo_opd.projection.display import audit_lines, audit_table
from nemo_opd.teacher_cache.shard import read_manifest

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def run_summary(plan: Plan) -> RunSummary:
    """Return the summary that loggers show at the start of a run."""
    config, train = plan.config, plan.config.train
    noun = "packed rows of" if config.packs_documents else "sequences of up to"
    cut = _cut_texts(plan)
    teachers = [
        TeacherSummary(
            name=settings.name,
            model=_origin(settings),
            type=settings.type,
            weight=settings.weight,
            loss=config.term(i).type,
            coverage=(
                *(
                    (*audit_lines(teacher.audit), f"{config.term(i).type}: take {config.term(i).take}")
                    if teacher.audit
                    else ()
                ),
                *_coverage_lines(plan.survey, i),
            ),
            warnings=tuple(fit_warnings(teacher.audit, config.term(i).type)) if teacher.audit else (),
        )
        for i, (settings, teacher) in enumerate(zip(config.active_teachers, plan.teachers, strict=True))
    ]
    warnings = [*plan.warnings, *(f"{teacher.name}: {warning}" for teacher in teachers for warning in teacher.warnings)]
    models = {
        config.student.reference,
        *config.active_names,
        *(teacher.reference for teacher in config.active_teachers),
    }
    return RunSummary(
        name=config.run.name,
        student=without_secrets(config.student.model + (f" with {plan.started_from}" if plan.started_from else "")),
        teachers=tuple(teachers),
        device=device_name(plan.device),
        layout=_layout_of(plan),
        total_steps=plan.total_steps,
        choices=_choices(plan),
        data=f"{len(plan.data.train):,} {plan.data.noun} from {_columns(config.data)}" + (f", {cut}" if cut else ""),
        batch=f"{train.global_batch_size} {noun} {train.max_length:,} tokens",
        tokens_at_a_time=train.tokens_at_a_time,
        output_dir=plan.output_dir,
        warnings=tuple(_folded(warnings, models)),
    )


def _folded(warnings: Iterable[str], models: Collection[str]) -> Iterator[str]:
    """Yield one warning of each kind, with the models or the number of the other warnings of its kind.

    Warnings are of one kind if they differ in numbers and in `models` (names and references) alone.
    """
    mentioned = re.compile("|".join(rf"(?<![\w.]){re.escape(name)}(?!\w)" for name in sorted(models, key=len)[::-1]))
    kinds: dict[str, list[str]] = {}
    for warning in warnings:
        kinds.setdefault(_NUMBER.sub("#", mentioned.sub("@", warning)), []).append(warning)
    for first, *repeated in kinds.values():
        subjects = [match[0] for warning in repeated if (match := mentioned.search(warning))]
        more = ", ".join(subjects) if len(subjects) == len(repeated) else f"{len(repeated)} more"
        yield f"{first} (the same holds for {more})" if repeated else first


def print_plan(plan: Plan, console: Console) -> dict[str, Any]:
    """Print the projections' audits, the batch grid, the memory estimate and the result of the dry run, and on stderr
    its warnings.

    Returns the result in values that JSON can hold. Raises ConfigError, after all is printed, if the run needs more
    memory than there is.
    """
    audits = [teacher.audit for teacher in plan.teachers if teacher.audit is not None]
    for audit in audits:
        console.print(audit_table(audit))
    warnings = run_summary(plan).warnings
    for warning in warnings:
        print_warning(warning)
    rows = plan_rows(plan)
    table = Table("batch", "", title="Batch grid", title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    for lines in memory_report(plan.memory, plan.config):
        console.print(lines)
    if not plan.config.logging.console.memory_table:
        console.print(Text("  table of parts and phases: logging.console.memory_table=true", "dim"))
    unread = _unread(plan)
    for line in unread:
        console.print(Text(line, "dim"))
    if not plan.memory.fits():
        raise ConfigError(f"the run does not fit: {peak_text(plan.memory.shortest)}; nothing was written")
    number = f" with {len(warnings)} warning{'s' * (len(warnings) > 1)}" if warnings else ""
    console.print(
        Text.assemble(
            (f"dry run passed{number}", "bold yellow" if warnings else "bold green"),
            ": settings, models, data and layout fit; nothing was written",
        )
    )
    return {
        "status": "dry run passed",
        "output_dir": str(plan.output_dir),
        "warnings": warnings,
        "total_steps": plan.total_steps,
        "plan": rows,
        "memory": [
            {
                "name": memory.name,
                "peak_bytes": memory.peak,
                "peak_phase": memory.peak_phase.value,
                "available_bytes": memory.capacity,
            }
            for memory in plan.memory.memories
        ],
        "not_read": unread,
    }


def plan_rows(plan: Plan) -> dict[str, str]:
    """Return the plan's facts by heading."""
    train, data, teachers = plan.config.train, plan.data, plan.config.active_teachers
    noun = "packed rows" if plan.config.packs_documents else "sequences"
    rows = {
        **_data_rows(plan.config.data, data),
        **_question_rows(plan),
        f"{noun} per step": str(train.global_batch_size),
        "device": plan.device,
        "student": _describe_layout(plan.student_layout),
        **{
            f"teacher {teacher.name}": f"{teacher.type}, "
            + ("in the student's processes" if i in plan.placement.inside else _describe_layout(layout))
            for i, (teacher, layout) in enumerate(zip(teachers, plan.teacher_layouts, strict=True))
        },
        "placement of teachers": _describe_placement(plan),
        f"{noun} per rank": str(plan.rows_per_rank),
        "tokens at a time": f"{train.tokens_at_a_time:,} per rank",
        "longest sequence": f"{train.max_length:,} tokens",
        **({f"{plan.data.noun} cut": cut} if (cut := _cut_texts(plan)) else {}),
        "steps per epoch": f"{_about(plan)}{plan.steps_per_epoch:,}",
        **_choices(plan),
        "aggregation": plan.config.aggregation.type,
        "handoff": f"{plan.config.handoff.type} by {plan.transport}",
    }
    return rows | _traffic_rows(plan) | _coverage_rows(plan)


def _choices(plan: Plan) -> dict[str, str]:
    """Return what the run's settings come to, by heading."""
    config = plan.config
    optimizer, loss, rollout = config.student.optimizer, config.loss, config.rollout
    terms: list[Loss | LossTerm] = [config.term(i) for i in range(len(config.active_teachers))]
    if isinstance(loss, GRPOLoss):
        terms.insert(0, loss)
    losses = [*dict.fromkeys(map(_loss_name, terms)), *[f"KD weight {loss.kd_weight:g}"] * bool(terms)]
    if rollout is None or rollout.on_policy_share < 1:  # sampled tokens have no cross-entropy
        losses.append(f"cross-entropy weight {loss.ce_weight:g}")
    choices = {
        "steps": f"{plan.total_steps:,}, {_about(plan)}{plan.total_steps / plan.steps_per_epoch:.3g} epochs",
        "learning rate": f"{optimizer.lr:g}, {optimizer.type}, {config.student.scheduler.type}",
        "loss": ", ".join(losses),
    }
    if rollout is not None:
        some = "" if rollout.on_policy_share == 1 else f", for {rollout.on_policy_share:.0%} of the prompts"
        choices["samples"] = f"{rollout.n} of each prompt, up to {rollout.max_new_tokens:,} tokens each{some}"
    if rollout is not None and config.reward is not None:
        trains = isinstance(loss, GRPOLoss) or config.reward.weighting_beta is not None
        choices["reward"] = config.reward.type + ("" if trains else ", logged, not learned from")
    return choices


def _loss_name(loss: Loss | LossTerm) -> str:
    """Name a loss with the settings that differ from its defaults."""
    name = loss_name(loss.type, getattr(loss, "divergence", None), getattr(loss, "common_weight", None))
    changed = loss.model_dump(exclude_defaults=True, exclude={"type", "divergence", *Objective.model_fields})
    return " ".join([name, *(f"{key}={value}" for key, value in changed.items())])


def _about(plan: Plan) -> str:
    return "about " if plan.config.packs_documents and plan.config.train.epochs is None else ""


def _cut_texts(plan: Plan) -> str:
    """Say how many texts are cut, and with which setting fewer would be; empty if none is."""
    statistics, limit = plan.survey, plan.config.train.max_length
    if lengths := sorted(statistics.whole_lengths):
        number = sum(length > limit for length in lengths)
        most, longest = lengths[(len(lengths) * 9 - 1) // 10], lengths[-1]
        some = f"{most:,} for 9 in 10, " if limit < most < longest else ""
        return (
            f"{number} of {len(lengths)} checked are cut at train.max_length={limit:,}; set {some}{longest:,} for all"
        )
    if not statistics.num_full:
        return ""
    number, checked = statistics.num_full, statistics.num_texts
    way_out = "" if plan.config.data.is_chat else "; data.packing=true reads texts whole"
    return f"{number} of {checked} checked reach train.max_length={limit:,} and may be cut{way_out}"


def _origin(teacher: Teacher) -> str:
    """Describe the teacher's model and its cache or servers, or its relation to the student's weights."""
    if teacher.weights == "ema":
        return f"average of the student's weights, decay {teacher.ema_decay:g}"
    if teacher.weights == "student":
        return f"the student's weights{'' if teacher.adapters else ', without adapters'}"
    if teacher.cache is not None:
        return f"{without_secrets(read_manifest(teacher.cache).teacher)}, cached in {teacher.cache}"
    if teacher.served is not None:
        return f"{without_secrets(teacher.reference)}, served by {', '.join(map(without_secrets, teacher.served.urls))}"
    return without_secrets(teacher.reference)


def _coverage_lines(statistics: DataStatistics, teacher: int) -> list[str]:
    share = statistics.coverage[teacher]
    return [] if share is None else [f"{share:.1%} of the scored tokens in {statistics.num_texts} texts get KD from it"]


def _layout_of(plan: Plan) -> str:
    """Describe layouts: `2 ranks: 2 tensor parallel; teachers separate, 1 batch ahead: cross 1 rank, same 1 rank`."""
    student = _describe_layout(plan.student_layout)
    teachers = {
        name: _describe_layout(layout)
        for i, (name, layout) in enumerate(zip(plan.config.active_names, plan.teacher_layouts, strict=True))
        if i not in plan.placement.inside
    }
    if not plan.placement.is_separate and set(teachers.values()) <= {student}:
        return student
    named = ", ".join(f"{name} {layout}" for name, layout in teachers.items())
    return f"{student}; teachers {_describe_placement(plan)}: {named}"


def _unread(plan: Plan) -> list[str]:
    """Return lines on the data that the checks did not read."""
    config = plan.config
    loaded = [teacher.reference for teacher in config.active_teachers if teacher.is_computed]
    models = dict.fromkeys([config.student.model, *loaded])
    unread = [f"the weights of {', '.join(models)}"]
    if (number := len(plan.data.train) - plan.survey.num_texts) > 0:
        unread.append(f"{number:,} of {len(plan.data.train):,} training {plan.data.noun}, tokenized during the run")
    lines = [f"not read: {'; '.join(unread)}"]
    if plan.progress is not None:
        lines.append(f"checked against its hashes, not loaded: the checkpoint of step {plan.progress.step}")
    return lines


def _traffic_rows(plan: Plan) -> dict[str, str]:
    """Return a row for each teacher whose output is sent between nodes."""
    backend = BACKENDS[plan.device]
    rows = {}
    for name, delivery in zip(plan.config.active_names, plan.deliveries, strict=True):
        if delivery.crosses_nodes:
            total = sum(delivery.traffic, Traffic())
            rows[f"{name}, between nodes"] = (
                f"{_amount(total.output)} of hidden states per step, {_amount(total.head)} of heads once, by {backend}"
            )
    return rows


def _coverage_rows(plan: Plan) -> dict[str, str]:
    """Return rows with each teacher's coverage and longest sequence, estimated from the sampled texts."""
    rows = {}
    statistics = plan.survey
    of_teachers = zip(plan.config.active_names, statistics.coverage, statistics.targets, statistics.widths, strict=True)
    for name, share, targets, width in of_teachers:
        if share is not None:
            rows[f"{name}, KD coverage"] = f"{share:.1%} of the scored tokens in {plan.survey.num_texts} texts"
        if targets is not None:
            rows |= {f"{name}, {label}": value for label, value in targets.lines().items()}
        rows[f"{name}, longest sequence"] = f"about {width:,} of its tokens"
    return rows


def _amount(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.2f} MiB"


def _data_rows(settings: Data, data: Corpus | Prompts) -> dict[str, str]:
    def counted(part: Sized | None) -> str:
        return "none" if part is None else f"{len(part):,}"

    columns = _columns(settings)
    if isinstance(data, Corpus):
        return {
            "training documents": f"{counted(data.train)}, from {columns}",
            "validation documents": counted(data.validation),
        }
    return {
        "prompts": f"{counted(data.train)}, from {columns}, {data.train.num_dropped:,} too long left out",
        "validation documents": counted(data.validation),
    }


def _columns(settings: Data) -> str:
    """Describe the columns of documents, such as `text (text_key)`."""
    return ", ".join(f"{name} ({setting})" for setting, name in settings.document_columns)


def _question_rows(plan: Plan) -> dict[str, str]:
    """Return rows with the number of questions of each set, and the benchmarks."""
    if plan.config.evaluation is None:
        return {}
    rows = {
        f"questions{f' of {loaded.resolved.name}' * bool(loaded.resolved.name)}": f"{len(loaded.prompts):,}"
        + f", {loaded.num_dropped:,} too long left out" * bool(loaded.num_dropped)
        for loaded in plan.questions
    }
    if plan.benchmarks is not None:
        rows["benchmarks"] = ", ".join(loaded.settings.label for loaded in plan.benchmarks.loaded)
    return rows or {"questions": "none"}


def _describe_layout(layout: Layout) -> str:
    """Describe a layout, such as `16 ranks: 4 data × 4 tensor parallel, in 2 copies of the model`."""
    kinds = {"data": layout.dp, "context": layout.cp, "tensor": layout.tp}
    parallel = [f"{degree} {kind}" for kind, degree in kinds.items() if degree > 1]
    ranks = f"{layout.size} rank" + ("s" if layout.size > 1 else "")
    copies = f", in {layout.replicas} copies of the model" if layout.replicas > 1 else ""
    return f"{ranks}: {' × '.join(parallel)} parallel{copies}" if parallel else ranks


def _describe_placement(plan: Plan) -> str:
    batches = f"{plan.lookahead} batch" + ("" if plan.lookahead == 1 else "es")
    if not plan.placement.is_separate:
        return f"colocated, {batches} ahead" if plan.lookahead else "colocated"
    return f"separate, {batches} ahead"
