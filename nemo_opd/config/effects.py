"""Settings that would be accepted and then ignored, because of others: each is refused, with a way out."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from nemo_opd.config.loss import ChunkTerm, DivergenceTerm, TCADTerm
from nemo_opd.config.objective import Objective
from nemo_opd.config.parallelism import Parallelism
from nemo_opd.config.rollout import ServerRollout
from nemo_opd.config.run_fields import RunFields
from nemo_opd.config.teacher import SameTokenizerTeacher

_Ignored = Iterator[tuple[str, str]]
"""Key, and why it has no effect and what to do."""


def check_effects(config: RunFields) -> None:
    """Raise ValueError for the first setting that was changed from its default and has no effect."""
    for of in (_of_weights, _of_templates, _of_data, _of_steps, _of_sampling, _of_cluster, _of_loss):
        for key, reason in of(config):
            value, default = _value_and_default(config, key)
            # null turns a setting off, which is no wish that would go unheard.
            if value is None or value == default:
                continue
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ValueError(f"{key}={shown} has no effect: {reason}")


def _value_and_default(config: RunFields, key: str) -> tuple[Any, Any]:
    owner: Any = config
    *path, name = key.split(".")
    for part in path:
        owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
    assert isinstance(owner, BaseModel)
    return getattr(owner, name), type(owner).model_fields[name].get_default(call_default_factory=True)


def _of_weights(config: RunFields) -> _Ignored:
    """Find settings of self-teachers that the student has for them, and settings of self-teachers that others have."""
    for i, teacher in enumerate(config.teachers):
        key = f"teachers.{i}"
        if teacher.weights != "ema":
            yield f"{key}.ema_decay", f"{key}.weights={teacher.weights}; write {key}.weights=ema, or leave it out"
        if teacher.weights != "student":
            yield f"{key}.adapters", f"{key}.weights={teacher.weights}; write {key}.weights=student, or leave it out"
        elif config.student.lora is None:
            yield f"{key}.adapters", "the student has none; set student.lora, or leave it out"
        if teacher.weights == "student":
            yield f"{key}.offload", "the weights are the student's; set student.offload, or leave it out"
        if teacher.is_student:
            names = ("tokenizer", "dtype", "attn_implementation", "fused_layers", "compile")
            for name in (*names, *(f"parallelism.{each}" for each in Parallelism.model_fields)):
                yield (
                    f"{key}.{name}",
                    f"with weights={teacher.weights} {teacher.name} computes in the student's processes, as the "
                    f"student does; set student.{name}, or leave it out",
                )


def _of_templates(config: RunFields) -> _Ignored:
    is_chat = config.data.messages_key is not None
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
                    f"them; leave it out, or write teachers.{i}.type=cross_tokenizer, which renders conversations in "
                    "the teacher's own way also where the tokenizers are the same",
                )


def _of_data(config: RunFields) -> _Ignored:
    is_chat, is_on_policy = config.data.messages_key is not None, config.rollout is not None
    if is_chat:
        yield "data.text_key", "data.messages_key names the column of conversations instead; leave one of the two out"
        yield "data.append_eos", "the chat template writes what ends a conversation; leave it out"
        yield "data.special_tokens", "the chat template writes special tokens, which have to be read; leave it out"
    if is_chat or is_on_policy:
        what = "a conversation" if is_chat else "a prompt with its response"
        yield "data.packing", f"{what} is one sequence, which models read without padding in any case; leave it out"
    if not is_chat:
        yield "data.learned_turns", "texts have no turns; set data.messages_key for conversations, or leave it out"
    elif is_on_policy:
        yield "data.learned_turns", "what the student samples is learned; leave it out"
    if is_on_policy:
        yield "data.special_tokens", "prompts are read with special tokens; leave it out"
        yield "data.append_eos", "a response ends where the student ends it; leave it out"
    else:
        yield "data.response_key", "the student learns from data.text_key whole; add rollout=hf, or leave it out"


def _of_steps(config: RunFields) -> _Ignored:
    if config.train.micro_batch_tokens is not None:
        way_out = "leave one of them out, a recipe's by ~train.micro_batch_size"
        yield "train.micro_batch_size", f"train.micro_batch_tokens says how many tokens there are; {way_out}"
    if config.run.output_dir is None:
        yield "run.resume", "a run without run.output_dir has a new directory each time; name that of the first run"
    if config.loss.scaling == "fixed":
        for name in ("scaling_decay", "scaling_cap"):
            yield f"loss.{name}", "loss.scaling=fixed; write loss.scaling=dynamic, or leave it out"
    elif not (config.loss.ce_weight and config.loss.kd_weight):
        yield "loss.scaling", "it balances KD with CE, and one of loss.kd_weight and loss.ce_weight is 0; raise it"


def _of_sampling(config: RunFields) -> _Ignored:
    if config.rollout is None:
        for name in type(config.health).model_fields:
            yield f"health.{name}", "it watches what the student samples; add rollout=hf, or leave it out"
        yield "logging.rollouts.every", "the student samples nothing; add rollout=hf, or leave it out"
    if config.logging.rollouts.every is None:
        for name in ("file_mb", "keep_files"):
            yield f"logging.rollouts.{name}", "no rollouts are written; set logging.rollouts.every, or leave it out"
    if isinstance(config.rollout, ServerRollout) and config.rollout.url is not None:
        for name in ("command", "options", "environment", "memory_share", "gpus"):
            yield f"rollout.{name}", "rollout.url names a server that runs already; leave one of the two out"
    elif isinstance(config.rollout, ServerRollout) and config.rollout.program == "transformers":
        for name in ("memory_share", "gpus"):
            yield f"rollout.{name}", "rollout.program=transformers takes what it needs; leave it out"
    if config.reward is not None and not config.active_teachers:
        yield "reward.weighting_beta", "it weighs distillation, and loss.kd_weight=0; raise it, or leave this out"
    if config.evaluation is not None and not config.evaluation.data.given:
        yield "evaluation.data.max_samples", "evaluation.data names no questions; write it below a set, or name some"
    if config.evaluation is not None and config.rollout is not None:
        yield "evaluation.batch_size", "the engine of `rollout` answers; set rollout.batch_size, or leave it out"
    if config.evaluation is not None and not config.evaluation.teachers:
        yield "evaluation.teacher_batch_size", "no teacher is asked; write evaluation.teachers=true, or leave it out"


def _of_cluster(config: RunFields) -> _Ignored:
    cluster = config.cluster
    if config.rollout is not None:
        yield "cluster.prefetch", "the student samples a batch once it has learned from those before; leave it out"
    elif not config.teachers_work_ahead:
        yield "cluster.prefetch", "teachers take turns with the student; write cluster.placement=separate"
    if cluster.device == "cpu":
        yield "cluster.gpus_per_node", "cluster.device=cpu; set cluster.cpu_ranks, or leave it out"
    if cluster.device == "cuda":
        yield "cluster.cpu_ranks", "cluster.device=cuda; set cluster.gpus_per_node, or leave it out"


def _of_loss(config: RunFields) -> _Ignored:
    """Find settings of loss terms that no teacher has."""
    followers = [teacher for teacher in config.active_teachers if teacher.loss is None]
    is_chunked = isinstance(config.loss, ChunkTerm)
    if is_chunked and followers and all(isinstance(each, SameTokenizerTeacher) for each in followers):
        common = {*DivergenceTerm.model_fields, *Objective.model_fields, "type"}
        for name in type(config.loss).model_fields.keys() - common:
            yield (
                f"loss.{name}",
                f"it is of teachers with another tokenizer, and none takes loss.type={config.loss.type} from here; "
                "leave it out",
            )
    if config.rollout is None:
        for i, teacher in enumerate(config.active_teachers):
            key = "loss" if teacher.loss is None else f"teachers.{i}.loss"
            if isinstance(config.loss if teacher.loss is None else teacher.loss, TCADTerm):
                yield f"{key}.power_alpha", "it weighs the rollouts of a prompt; add rollout=hf, or leave it out"
