"""Every setting is decided on once: it may change when a run is continued, or it may not."""

from pydantic import BaseModel

from nemo_opd.checkpoint.identity import FREE, FREE_KEYS, decided_in, fields
from nemo_opd.config import RunConfig, cluster, loss, objective, reward, rollout, train
from nemo_opd.config.context import Context
from nemo_opd.config.data import Data, HubDataset, Source
from nemo_opd.config.model import Lora, Model, Student
from nemo_opd.config.reward import SandboxSettings
from nemo_opd.config.run_fields import Run
from nemo_opd.config.teacher import (
    CachedTeacher,
    CrossTokenizerTeacher,
    Endpoint,
    OwnIdsTeacher,
    SameTokenizerTeacher,
    ServedTeacher,
    TeacherBase,
)
from nemo_opd.config.train import Train

BOUND: dict[type[BaseModel], str] = {
    Run: "seed",
    Train: "global_batch_size max_length gradient_clip",
    Model: "model tokenizer chat_template chat_template_kwargs",
    Student: "dtype",
    TeacherBase: "name weight weights ema_decay adapters dtype cache",
    Context: "system_prompt template key",
    SameTokenizerTeacher: "type",
    OwnIdsTeacher: "projection top_k projection_lr roles max_length equal_history",
    CrossTokenizerTeacher: "type",
    CachedTeacher: "type",
    ServedTeacher: "type",
    Endpoint: "program logprobs",
    Lora: "rank alpha dropout target_modules",
    train.OptimizerBase: "lr",
    train.Decoupled: "weight_decay",
    train.Adam: "betas eps",
    train.AdamW: "type",
    train.AdamW8bit: "type",
    train.Muon: "type momentum nesterov ns_steps adjust_lr others_lr",
    train.Adafactor: "type beta2_decay clip",
    train.ClassOptimizer: "type name arguments sharded",
    train.Scheduler: "type warmup_steps min_lr_ratio",
    Source: "arrow_files parquet_files jsonl_files text_files",
    HubDataset: "path name split",
    Data: "text_key messages_key tools_key learned_turns response_key append_eos special_tokens shuffle packing",
    objective.WeightedSum: "type weights alpha vocabulary_scaling",
    objective.AveragedLogits: "type",
    objective.SelectTeacher: "type per",
    objective.Routed: "type key",
    cluster.HiddenStatesHandoff: "type",
    cluster.LogitsHandoff: "type",
    rollout.RolloutBase: (
        "n max_new_tokens max_prompt_length temperature top_p top_k on_policy_share staleness overlap"
    ),
    rollout.HFRollout: "type",
    rollout.ServerRollout: "type program",
    reward.RewardBase: "weighting_beta",
    reward.SingleReward: "type answer_key",
    reward.WeightedPart: "weight",
    reward.WeightedReward: "type",
    reward.SourceReward: "type key",
    reward.LastTurn: "type",
    reward.Boxed: "type",
    reward.AnswerLine: "type marker",
    reward.Choice: "type letters",
    reward.Regex: "type pattern timeout_s",
    reward.Json: "type schema_file key",
    reward.ExactReward: "type ignore_case",
    reward.NumericReward: "type tolerance",
    reward.MathReward: "type timeout_s",
    reward.CodeReward: "type entry_point_key",
    SandboxSettings: "timeout_s memory_mb processes scratch_mb output_kb",
    reward.EnvironmentReward: "type",
    reward.FunctionReward: "type function",
    reward.FormatReward: "type",
    rollout.EnvironmentBase: "max_turns max_response_tokens",
    rollout.CalculatorEnvironment: "type",
    rollout.FunctionEnvironment: "type function",
    objective.Objective: "kd_weight ce_weight scaling scaling_decay scaling_cap",
    loss.DivergenceTerm: "divergence beta mixed_weight temperature",
    loss.NormalizedTerm: "normalizer",
    loss.ChunkTerm: "continuation_weight",
    loss.PairedTerm: "compat merge common_weight uncommon_weight uncommon_topk",
    loss.SameVocabTerm: "type support top_k normalization",
    loss.PKLTerm: "type compat merge coverage_coef vocab_topk",
    loss.StrictTerm: "type top_k normalization",
    loss.TCADTerm: "type support_size support coverage_coef power_alpha",
    loss.SampledKLTerm: "type estimator update clip_low clip_high dual_clip",
    loss.ImportanceSettings: "importance_cap importance_level importance_veto",
    loss.ULDTerm: "type temperature compat",
    loss.ALMTerm: "type temperature",
    loss.GoldTerm: "type",
    loss.HKLTerm: "type",
    loss.SharedPrefixTerm: "type",
    loss.BytePrefixTerm: "type positions ends pieces",
    loss.FunctionTerm: "type function arguments",
    objective.GRPOLoss: "type policy_weight clip_low clip_high dual_clip scale_advantages",
}


def test_every_field_is_decided_on_once() -> None:
    """A field that is added to the settings fails here until someone says whether a run may go on with another."""
    decisions = {
        f"{model.__name__}.{name}": (decided_in(FREE, model, name), decided_in(BOUND, model, name))
        for _, model, name in fields(RunConfig)
    }

    assert len(decisions) > 150  # the walk itself works
    assert [field for field, (free, bound) in decisions.items() if free == bound] == []


def test_the_tables_name_only_fields_that_there_are() -> None:
    """Catches a decision that a renamed field has left behind."""
    named = [(model, name) for table in (FREE, BOUND) for model, names in table.items() for name in names.split()]

    assert [f"{model.__name__}.{name}" for model, name in named if name not in model.model_fields] == []


def test_a_key_has_the_same_decision_in_every_kind_of_a_section() -> None:
    """Keys are compared without the type of their section."""
    bound = {key for key, model, name in fields(RunConfig) if not decided_in(FREE, model, name)}

    assert bound & FREE_KEYS == set()


def test_what_an_issue_of_operation_changes_is_free() -> None:
    for key in ("url", "command", "options", "concurrency", "retries", "request_timeout_s", "start_timeout_s"):
        assert f"rollout.{key}" in FREE_KEYS
    assert {"evaluation", "health.action", "logging.wandb.mode", "data.validation"} <= FREE_KEYS
    assert "teachers.*.offload" in FREE_KEYS
