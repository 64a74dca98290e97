"""Which settings may change between the parts of a run, decided once for every field.

Free: speed, placement, reporting, length, and how the same samples are obtained. Bound: what is learned, and from what.
`tests/checkpoint/test_free_settings.py` fails for a field without a decision.
"""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from nemo_opd.config import aggregation, environment, handoff, loss, optim, reward, rollout
from nemo_opd.config.cluster import Cluster
from nemo_opd.config.data import Data, HubDataset, Source
from nemo_opd.config.health import Health
from nemo_opd.config.logging import Console, Logging, TensorBoard, Wandb
from nemo_opd.config.lora import Lora
from nemo_opd.config.model import Model, Student
from nemo_opd.config.parallelism import Parallelism
from nemo_opd.config.run import RunConfig
from nemo_opd.config.run_fields import Run
from nemo_opd.config.teacher import CrossTokenizerTeacher, SameTokenizerTeacher, TeacherBase
from nemo_opd.config.train import Train

FREE: dict[type[BaseModel], str] = {
    # A section named here is free as a whole: it shares classes with sections that are bound.
    RunConfig: "evaluation",
    Data: "validation num_workers cache",
    Run: "name output_dir resume dry_run",
    Train: "max_steps epochs micro_batch_size validate_every save_every keep_last max_skipped_steps",
    Student: "offload activation_checkpointing compile",
    TeacherBase: "offload",
    Lora: "export",
    Parallelism: "tp cp sequence_parallel",
    handoff.HandoffBase: "transport",
    rollout.HFRollout: "batch_size",
    # Where a server is and how it is reached. Its program is bound: each has its own numerics.
    rollout.ServerRollout: (
        "url command options environment memory_share start_timeout_s request_timeout_s retries concurrency "
        "weights_folder"
    ),
    reward.FunctionReward: "call_timeout_s",
    environment.EnvironmentBase: "call_timeout_s",
    Health: "action patience max_length_growth max_truncation_rate min_entropy max_repetition max_mismatch",
    Cluster: ("device launcher num_nodes gpus_per_node cpu_ranks placement teacher_ranks prefetch address timeout_s"),
    Console: "enabled interval_s memory_table",
    TensorBoard: "enabled",
    Wandb: "enabled project entity mode",
    Logging: "gradients_every",
}
BOUND: dict[type[BaseModel], str] = {
    Run: "seed",
    Train: "global_batch_size max_length gradient_clip",
    Model: "model tokenizer chat_template chat_template_kwargs",
    Student: "dtype",
    TeacherBase: "name weight dtype",
    SameTokenizerTeacher: "type",
    CrossTokenizerTeacher: "type projection top_k roles max_length equal_history",
    Lora: "rank alpha dropout target_modules",
    optim.AdamW: "type lr betas eps weight_decay",
    optim.Scheduler: "type warmup_steps min_lr_ratio",
    Source: "arrow_files parquet_files jsonl_files text_files",
    HubDataset: "path name split",
    Data: "text_key messages_key tools_key response_key append_eos shuffle",
    aggregation.WeightedSum: "type weights alpha vocabulary_scaling",
    aggregation.AveragedLogits: "type",
    aggregation.SelectTeacher: "type per",
    aggregation.Routed: "type key",
    handoff.HiddenStatesHandoff: "type",
    handoff.LogitsHandoff: "type",
    rollout.RolloutBase: (
        "n max_new_tokens max_prompt_length temperature top_p top_k on_policy_share staleness overlap"
    ),
    rollout.HFRollout: "type",
    rollout.ServerRollout: "type program",
    reward.RewardBase: "answer_key weighting_beta",
    reward.ExactReward: "type ignore_case",
    reward.NumericReward: "type tolerance",
    reward.MathReward: "type timeout_s",
    reward.EnvironmentReward: "type",
    reward.FunctionReward: "type function",
    environment.EnvironmentBase: "max_turns max_response_tokens",
    environment.CalculatorEnvironment: "type",
    environment.FunctionEnvironment: "type function",
    loss.Objective: "kd_weight ce_weight scaling scaling_decay scaling_cap",
    loss.DivergenceTerm: "divergence beta mixed_weight temperature",
    loss.TemperatureTerm: "temperature",
    loss.ChunkTerm: "continuation_weight",
    loss.PairedTerm: "compat merge common_weight uncommon_weight uncommon_topk",
    loss.SameVocabTerm: "type support top_k normalization",
    loss.PKLTerm: "type compat merge coverage_coef vocab_topk",
    loss.StrictTerm: "type top_k normalization",
    loss.TCADTerm: "type support_size support coverage_coef power_alpha",
    loss.SampledKLTerm: "type estimator update clip_low clip_high dual_clip",
    loss.ImportanceSettings: "importance_cap importance_level importance_veto",
    loss.ULDTerm: "type compat",
    loss.ALMTerm: "type",
    loss.GoldTerm: "type",
    loss.HKLTerm: "type",
    loss.SharedPrefixTerm: "type",
    loss.BytePrefixTerm: "type",
    loss.FunctionTerm: "type function arguments",
    loss.GRPOLoss: "type policy_weight clip_low clip_high dual_clip scale_advantages",
}


def decided_in(table: dict[type[BaseModel], str], model: type[BaseModel], name: str) -> bool:
    """True where the table names the field for a class that the model is or inherits from."""
    return any(name in table.get(base, "").split() for base in model.__mro__)


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel], str]]:
    """Yield dotted key, class and name of every field that is decided on: values, and sections that are free whole.

    An element of a list has the key `*`.
    """
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        inner, is_list = sections(field.annotation)
        if not inner or decided_in(FREE, model, name):
            yield key, model, name
            continue
        for section in inner:
            yield from fields(section, f"{key}.*." if is_list else f"{key}.")


def sections(annotation: Any) -> tuple[list[type[BaseModel]], bool]:
    """Return the classes that a field may hold, and whether it holds a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], False
    inner = [sections(argument) for argument in get_args(annotation)]
    is_list = getattr(annotation, "__origin__", None) is tuple
    return [model for models, _ in inner for model in models], is_list or any(many for _, many in inner)


FREE_KEYS = frozenset(key for key, model, name in fields(RunConfig) if decided_in(FREE, model, name))
"""Dotted keys that may change, with `*` for the number of a list's element."""
