"""Settings that another setting would leave without effect are refused, not ignored."""

import re
from typing import Any

import pytest

from nemo_opd.config.run import from_dict
from nemo_opd.config.settings import Excludes, Needs, Settings
from tests.config.settings import HF, SAME, VALID, changed, message_of, on_policy

CHAT = {"messages_key": "messages"}


def off_policy(**sections: Any) -> dict[str, Any]:
    return VALID | sections


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (changed("teachers.0.chat_template", "/t"), r"teachers\.0\.chat_template=/t has no effect: the data are texts"),
        (changed("student.chat_template_kwargs", {"a": 1}), r"student\.chat_template_kwargs=\{'a': 1\} has no effect"),
        (
            off_policy(teachers=[SAME | {"chat_template_kwargs": {"a": 1}}], data=VALID["data"] | CHAT),
            r"teachers\.0\.chat_template_kwargs=.* same is of type same_tokenizer and reads the student's ids, .*"
            r"write teachers\.0\.type=cross_tokenizer",
        ),
        (changed("data", VALID["data"] | CHAT | {"text_key": "body"}), r"data\.text_key=body has no effect"),
        (changed("data", VALID["data"] | CHAT | {"append_eos": False}), r"data\.append_eos=false has no effect"),
        (changed("data.response_key", "answer"), r"data\.response_key=answer has no effect: .* add rollout=hf"),
        (on_policy(data={"append_eos": False}), r"data\.append_eos=false has no effect: the student ends its"),
        (changed("run.resume", "auto"), r"run\.resume=auto has no effect: a run without run\.output_dir"),
        (changed("loss.scaling_decay", 0.5), r"loss\.scaling_decay=0\.5 has no effect"),
        (changed("health.patience", 2), r"health\.patience=2 has no effect"),
        (
            on_policy(rollout={"type": "server", "url": "http://x", "options": ["--a"]}),
            r"rollout\.options=\[--a\] has no effect with url=http://x; leave one of the two out",
        ),
        (
            on_policy(
                reward={"type": "exact", "weighting_beta": 1}, loss={"type": "grpo"}, rollout=HF, teachers=[SAME]
            ),
            r"reward\.weighting_beta=1 has no effect: it weighs distillation, and loss\.kd_weight=0",
        ),
        (
            on_policy(reward={"type": "exact"}, evaluation={"teacher_batch_size": 2}),
            r"evaluation\.teacher_batch_size=2 has no effect: no teacher is asked",
        ),
        (changed("cluster", {"launcher": "local", "num_nodes": 2}), r"cluster\.num_nodes=2 .* launcher=local; write"),
        (changed("cluster.prefetch", 3), r"cluster\.prefetch=3 has no effect: teachers take turns"),
        (
            on_policy(cluster={"placement": "separate", "prefetch": 3}),
            r"cluster\.prefetch=3 has no effect: the student samples a batch after it has learned",
        ),
        (changed("cluster", {"device": "cpu", "gpus_per_node": 2}), r"cluster\.gpus_per_node=2 has no effect"),
        (changed("cluster", {"device": "cuda", "cpu_ranks": 2}), r"cluster\.cpu_ranks=2 has no effect"),
        (
            off_policy(teachers=[SAME], loss={"type": "p_kl", "vocab_topk": 5}),
            r"loss\.vocab_topk=5 has no effect: it is for teachers with another tokenizer",
        ),
        (
            off_policy(teachers=[SAME], loss={"type": "tcad", "power_alpha": 2}),
            r"loss\.power_alpha=2 has no effect: it weighs the rollouts",
        ),
        (
            changed("loss.beta", 0.9),
            r"0\.9 has no effect with divergence=forward_kl; write loss.divergence=jsd, or leave beta out \(~loss",
        ),
        (
            changed("loss.mixed_weight", 0.9),
            r"0\.9 has no effect with .*; write loss\.divergence=mixed",
        ),
        (
            off_policy(teachers=[SAME], loss={"type": "same_vocab", "normalization": "support"}),
            r"normalization=support has no effect with support=full; write loss.support=teacher_topk, student_topk or",
        ),
        (
            changed("loss", {"type": "gold", "uncommon_weight": 0, "uncommon_topk": 5}),
            r"5 has no effect with uncommon_weight=0; raise it",
        ),
        (
            changed("loss", {"type": "gold", "common_weight": 0, "divergence": "jsd"}),
            r"loss\.divergence=jsd has no effect with common_weight=0; raise .* leave divergence out",
        ),
        (
            on_policy(loss={"type": "sampled_kl", "estimator": "k2", "update": "direct", "clip_high": 0.9}),
            r"0\.9 has no effect with update=direct; write loss.update=policy_gradient, or leave clip_high out",
        ),
        (
            changed("student.scheduler", {"type": "linear", "min_lr_ratio": 0.1}),
            r"min_lr_ratio=0\.1 has no effect with type=linear",
        ),
        (
            off_policy(teachers=[VALID["teachers"][0] | {"projection": "/p", "top_k": 8}]),
            r"top_k=8 has no effect with projection=/p",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(data: dict[str, Any], says: str) -> None:
    assert re.search(says, message_of(data))


def test_the_former_divisor_is_taken_with_the_students_tokenizer() -> None:
    """Bug: config.yaml of an older run is refused for a former default."""
    from_dict(off_policy(teachers=[SAME], loss={"type": "p_kl", "normalizer": "units"}))


def test_a_setting_with_an_effect_is_accepted() -> None:
    """Catches a refused template of an evaluated teacher, and a resolved config that is refused for its defaults."""
    evaluated = on_policy(
        teachers=[SAME | {"chat_template": "/t"}],
        data=CHAT,
        reward={"type": "exact"},
        evaluation={"teachers": True, "teacher_batch_size": 2, "data": {"jsonl_files": "/q.jsonl"}},
    )
    for data in (evaluated, on_policy(health={"patience": 2}), changed("loss", {"type": "p_kl", "vocab_topk": 5})):
        config = from_dict(data)
        assert from_dict(config.model_dump(mode="json")) == config


def test_rules_name_settings_of_their_section() -> None:
    """Bug: a rule names a setting that was renamed."""
    models = [Settings]
    for model in models:
        models += model.__subclasses__()
        rules = [rule for field in model.model_fields.values() for rule in field.metadata]
        named = {rule.field for rule in rules if isinstance(rule, Needs | Excludes)}
        assert model.__subclasses__() or named <= model.model_fields.keys(), model
