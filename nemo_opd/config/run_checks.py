"""Checks of a run's settings: settings without effect, contexts, and chosen metrics. Each raises ValueError with the
way out.
"""

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from nemo_opd.config.loss import ChunkTerm, DivergenceTerm, TCADTerm
from nemo_opd.config.model import Parallelism
from nemo_opd.config.objective import Objective
from nemo_opd.config.run_fields import RunFields
from nemo_opd.config.settings import setting_text
from nemo_opd.config.teacher import Context, SameTokenizerTeacher

_Ignored = Iterator[tuple[str, str]]
"""Keys without effect, each with the reason and the way out."""


def check_effects(config: RunFields) -> None:
    """Raise ValueError for the first setting that differs from its default and has no effect."""
    checks = (
        _ignored_baseline,
        _ignored_teachers,
        _ignored_templates,
        _ignored_data,
        _ignored_steps,
        _ignored_sampling,
        _ignored_cluster,
        _ignored_loss,
    )
    for key, reason in (ignored for check in checks for ignored in check(config)):
        value, default = _value_and_default(config, key)
        # null turns a setting off, so no request is ignored.
        if value is None or value == default:
            continue
        raise ValueError(f"{key}={setting_text(value)} has no effect: {reason}")


def _value_and_default(config: RunFields, key: str) -> tuple[Any, Any]:
    owner: Any = config
    *path, name = key.split(".")
    for part in path:
        owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
    assert isinstance(owner, BaseModel)
    return getattr(owner, name), type(owner).model_fields[name].get_default(call_default_factory=True)


def _ignored_baseline(config: RunFields) -> _Ignored:
    if not config.active_teachers:
        yield "run.baseline", "the run has no teachers that could help (loss.kd_weight=0); leave it out"
    if not config.data.validation.given:
        yield "run.baseline", "there is no text to compare the two runs on; set data.validation, or leave it out"
    if config.train.early_stopping is not None and config.run.baseline is True:
        yield "run.baseline", "the two runs may end at different steps; leave out train.early_stopping, or this"
    if config.rollout is not None and config.run.baseline is True:
        yield (
            "run.baseline",
            "on-policy, a run without teachers has no texts to learn by cross-entropy; name the directory of a "
            "finished run without teachers, or leave it out",
        )


def _ignored_teachers(config: RunFields) -> _Ignored:
    """Yield settings that self-teachers take from the student."""
    for i, teacher in enumerate(config.teachers):
        key = f"teachers.{i}"
        if config.student.lora is None:
            yield f"{key}.adapters", "the student has none; set student.lora, or leave it out"
        if teacher.weights == "student":
            yield f"{key}.offload", "the weights are the student's; set student.offload, or leave it out"
        if teacher.is_student:
            names = ("tokenizer", "dtype", "attn_implementation", "fused_layers", "compile")
            for name in (*names, *(f"parallelism.{field}" for field in Parallelism.model_fields)):
                yield (
                    f"{key}.{name}",
                    f"with weights={teacher.weights} {teacher.name} computes in the student's processes, as the "
                    f"student does; set student.{name}, or leave it out",
                )


def _ignored_templates(config: RunFields) -> _Ignored:
    is_chat = config.data.is_chat
    asks_teachers = config.evaluation is not None and config.evaluation.teachers
    if not is_chat:
        texts = "the data are texts, which no chat template renders; set data.messages_key for conversations"
        yield "student.chat_template_kwargs", texts
    for i, teacher in enumerate(config.teachers):
        for name in ("chat_template", "chat_template_kwargs"):
            if not is_chat:
                yield f"teachers.{i}.{name}", texts
            elif isinstance(teacher, SameTokenizerTeacher) and not (teacher.context or asks_teachers):
                yield (
                    f"teachers.{i}.{name}",
                    f"{teacher.name} is of type same_tokenizer and reads the student's ids, as student.{name} renders "
                    f"them; leave it out, or write teachers.{i}.type=cross_tokenizer, which renders conversations "
                    "with the teacher's own template even if the tokenizers are the same",
                )


def _ignored_data(config: RunFields) -> _Ignored:
    data, is_chat, is_on_policy = config.data, config.data.is_chat, config.rollout is not None
    if not data.validation.given or data.validation.text_files:
        yield "data.validation.text_key", "no validation file has columns; leave it out"
    if is_on_policy:
        yield "data.validation.text_key", "prompts are validated as the training prompts are read; leave it out"
        if is_chat:
            way_out = "give arrow_files, parquet_files, jsonl_files or hub"
            yield "data.validation.text_files", f"the prompts are conversations, which have columns; {way_out}"
    if is_chat:
        setting = data.document_columns[0][0]
        yield "data.text_key", f"data.{setting} names the column of conversations instead; leave one of the two out"
        yield "data.append_eos", "the chat template ends the conversation; leave it out"
        yield "data.special_tokens", "the chat template writes special tokens that must be read; leave it out"
    if is_chat or is_on_policy:
        kind = "a conversation" if is_chat else "a prompt with its response"
        yield "data.packing", f"{kind} is one sequence, which models read without padding in any case; leave it out"
    if not is_chat:
        yield "data.learned_turns", "texts have no turns; set data.messages_key for conversations, or leave it out"
    elif is_on_policy:
        yield "data.learned_turns", "the student learns from its own samples; leave it out"
    if is_on_policy:
        yield "data.special_tokens", "prompts are read with special tokens; leave it out"
        yield "data.append_eos", "the student ends its responses itself; leave it out"
    else:
        yield "data.response_key", "the student learns from all of data.text_key; add rollout=hf, or leave it out"


def _ignored_steps(config: RunFields) -> _Ignored:
    if config.train.micro_batch_tokens is not None:
        way_out = "leave one of them out, a recipe's by ~train.micro_batch_size"
        yield "train.micro_batch_size", f"train.micro_batch_tokens sets the number of tokens; {way_out}"
    if config.run.output_dir is None:
        yield "run.resume", "a run without run.output_dir has a new directory each time; name the first run's"
    if not (config.loss.ce_weight and config.loss.kd_weight):
        yield "loss.scaling", "it balances KD with CE, and one of loss.kd_weight and loss.ce_weight is 0; raise it"


def _ignored_sampling(config: RunFields) -> _Ignored:
    if config.rollout is None:
        for name in type(config.health).model_fields:
            yield f"health.{name}", "it watches the student's samples; add rollout=hf, or leave it out"
        yield "logging.rollouts.every", "the student samples nothing; add rollout=hf, or leave it out"
    if config.reward is not None and not config.active_teachers:
        yield "reward.weighting_beta", "it weighs distillation, and loss.kd_weight=0; raise it, or leave this out"
    if config.evaluation is not None and not config.evaluation.data.given:
        yield "evaluation.data.max_samples", "evaluation.data names no questions; write it below a set, or name some"
    if config.evaluation is not None and config.rollout is not None:
        yield "evaluation.batch_size", "the engine of `rollout` answers; set rollout.batch_size, or leave it out"
    if config.evaluation is not None and not config.evaluation.teachers:
        yield "evaluation.teacher_batch_size", "no teacher is asked; write evaluation.teachers=true, or leave it out"


def _ignored_cluster(config: RunFields) -> _Ignored:
    cluster = config.cluster
    if config.rollout is not None:
        yield "cluster.prefetch", "the student samples a batch after it has learned from the previous one; leave it out"
    elif not config.teachers_work_ahead:
        yield "cluster.prefetch", "teachers take turns with the student; write cluster.placement=separate"
    if cluster.device == "cpu":
        yield "cluster.gpus_per_node", "cluster.device=cpu; set cluster.cpu_ranks, or leave it out"
    if cluster.device == "cuda":
        yield "cluster.cpu_ranks", "cluster.device=cuda; set cluster.gpus_per_node, or leave it out"


def _ignored_loss(config: RunFields) -> _Ignored:
    """Yield settings of loss terms that no teacher uses."""
    followers = [teacher for teacher in config.active_teachers if teacher.loss is None]
    is_chunked = isinstance(config.loss, ChunkTerm)
    if is_chunked and followers and all(isinstance(teacher, SameTokenizerTeacher) for teacher in followers):
        common = {*DivergenceTerm.model_fields, *Objective.model_fields, "type", "normalizer"}
        for name in (name for name in type(config.loss).model_fields if name not in common):
            yield (
                f"loss.{name}",
                f"it is for teachers with another tokenizer, and none of them uses loss.type={config.loss.type}; "
                "leave it out",
            )
    if config.rollout is None:
        for i, teacher in enumerate(config.active_teachers):
            key = "loss" if teacher.loss is None else f"teachers.{i}.loss"
            if isinstance(config.loss if teacher.loss is None else teacher.loss, TCADTerm):
                yield f"{key}.power_alpha", "it weighs the rollouts of a prompt; add rollout=hf, or leave it out"


def check_contexts(config: RunFields) -> None:
    """Check the context of every teacher that has one."""
    for i, teacher in enumerate(config.teachers):
        if teacher.context is not None:
            _check_prompts(config, teacher.context, f"teachers.{i}.context")
            _check_fields(config, teacher.context, f"teachers.{i}.context")


def _check_prompts(config: RunFields, context: Context, key: str) -> None:
    """Check that the data have prompts of the kind that the context replaces."""
    if config.data.is_chat:
        return
    if config.rollout is None:
        raise ValueError(
            f"{key}: the texts of data.text_key={config.data.text_key} have no prompt that a context could replace; "
            "set data.messages_key for conversations, add rollout=hf for prompts, or leave "
            f"{key} out"
        )
    if context.system_prompt is not None:
        raise ValueError(
            f"{key}.system_prompt: prompts of data.text_key={config.data.text_key} are texts, which have no system "
            f"message; write it at the start of {key}.template, or set data.messages_key for conversations"
        )


def _check_fields(config: RunFields, context: Context, key: str) -> None:
    """Check that fields are columns, and not columns that other settings use."""
    data = config.data
    if context.fields and (data.train.text_files or data.validation.text_files):
        raise ValueError(
            f"{key}.{context.named_in(context.fields[0])} names the column {context.fields[0]!r}, and text_files have "
            "none; give arrow_files, parquet_files, jsonl_files or hub"
        )
    used = [(f"data.{setting}", column) for setting, column in data.document_columns]
    used += [("aggregation.key", config.routing.key)] if config.routing else []
    for setting, column in used:
        if column in context.fields:
            raise ValueError(
                f"{key}.{context.named_in(column)} names the column {column!r}, which {setting} names too; write "
                "{prompt} for the student's prompt, or name another column"
            )


def check_chosen_metrics(config: RunFields) -> None:
    """Raise ValueError for a metric that the run does not measure, or measures only after the last step."""
    for key, setting in (("keep_best", config.train.keep_best), ("early_stopping", config.train.early_stopping)):
        if setting is None:
            continue
        metric = setting.metric
        measured = [*_validation_metrics(config), *_evaluation_metrics(config)]
        if metric not in measured and not _is_benchmark_metric(config, metric):
            close = difflib.get_close_matches(metric, measured, n=3, cutoff=0.4) or measured
            way_out = f"; there are {', '.join(close)}" if close else "; set data.validation or evaluation"
            raise ValueError(f"train.{key}.metric={metric}: no validation or evaluation of this run gives it{way_out}")
        is_validated = metric.startswith("val/")
        every = "train.validate_every" if is_validated else "evaluation.every"
        if (config.train.validate_every if is_validated else config.evaluation and config.evaluation.every) is None:
            raise ValueError(
                f"train.{key}.metric={metric}: it is measured only after the last step, too late to choose by; set "
                f"{every}"
            )


def _validation_metrics(config: RunFields) -> Iterator[str]:
    if not config.data.validation.given:
        return
    yield from ("val/loss", "val/ce", "val/bits_per_byte", "val/accuracy")
    if config.active_teachers:
        yield from ("val/shared_bits_per_byte", "val/kd", *(f"val/kd/{name}" for name in config.active_names))


def _evaluation_metrics(config: RunFields) -> Iterator[str]:
    evaluation = config.evaluation
    if evaluation is None:
        return
    for name, questions in (evaluation.all_sets or {"": evaluation}).items():
        prefix = f"eval/{name}/" if name else "eval/"
        yield from (f"{prefix}pass@{k}" for k in questions.k)
        yield from (f"{prefix}maj@{k}" for k in questions.k if k > 1)
        yield f"{prefix}mean@{questions.n}"
        if questions.greedy:
            yield f"{prefix}greedy"


def _is_benchmark_metric(config: RunFields, metric: str) -> bool:
    """Return whether a metric's name starts with a benchmark's; only the benchmark knows its full names."""
    names = [] if config.evaluation is None else [benchmark.label for benchmark in config.evaluation.benchmarks]
    return any(metric.startswith(f"eval/{name}/") for name in names)
