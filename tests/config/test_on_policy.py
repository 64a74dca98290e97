"""Messages about on-policy settings that cannot work together: key, value, reason and remedy."""

from typing import Any

import pytest

from nemo_opd.config.composition import from_yaml, to_yaml
from nemo_opd.config.loss import SameVocabTerm, SampledKLTerm, TCADTerm
from nemo_opd.config.run import from_dict
from nemo_opd.config.sampling_checks import confidence_alphas
from tests.config.settings import CROSS, HF, SAME, VALID, message_of, on_policy

NUMERIC = {"type": "numeric"}
SGLANG = {"type": "server", "program": "sglang"}


def test_a_valid_run_survives_its_own_config(tmp_path: Any) -> None:
    config = from_dict(on_policy(reward=NUMERIC, loss={"type": "tcad", "support_size": 8, "ce_weight": 0}))
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")

    assert from_yaml(tmp_path / "config.yaml") == config
    assert isinstance(config.term(0), TCADTerm)
    assert confidence_alphas(config) == [1.0]


def test_teachers_do_not_work_ahead_of_sampling() -> None:
    """Bug: a batch is sampled ahead with weights that are older than rollout.staleness allows."""
    separate = {"cluster": {"placement": "separate"}}
    assert from_dict(VALID | separate).teachers_work_ahead
    assert not from_dict(on_policy(**separate)).teachers_work_ahead


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"teachers": [CROSS], "loss": {"type": "byte_prefix", "positions": "all"}},
            "loss.ends=drop: its targets are exact on average over texts from the teacher's distribution, and not over "
            "the student's samples; write loss.ends=cover",
        ),
        (
            {"train": {"global_batch_size": 18}},
            "train.global_batch_size=18 counts rollouts, so it must be a multiple of rollout.n=4; write "
            "train.global_batch_size=20",
        ),
        ({"rollout": HF | {"max_new_tokens": 4096}}, "rollout.max_new_tokens=4096 leaves no room for a prompt in"),
        ({"rollout": HF | {"max_prompt_length": 4096}}, "rollout.max_prompt_length=4096 leaves no room for a response"),
        ({"rollout": HF | {"on_policy_share": 0.5}}, "rollout.on_policy_share=0.5 takes some responses from"),
        (
            {"rollout": HF | {"staleness": 1}},
            "rollout.staleness=1 has no effect with type=hf; write rollout.type",
        ),
        ({"rollout": {"type": "server", "overlap": True}}, "rollout.overlap=true samples with weights one step old"),
        (
            {"data": {"messages_key": "messages", "response_key": "response"}},
            "data.response_key=response: with data.messages_key the response is the assistant's last message",
        ),
        ({"environment": {"type": "calculator"}}, "environment: turns need conversations; name their column"),
        ({"reward": {"type": "environment"}}, "reward.type=environment: there is no environment"),
        (
            {
                "data": {"messages_key": "messages"},
                "environment": {"type": "calculator"},
                "reward": {"type": "environment"},
            },
            "environment.type=calculator rewards the right answer, and reward.answer_key names no column with it",
        ),
        ({"evaluation": {"data": {"jsonl_files": "a"}}}, "evaluation: answers are scored by the reward; set reward"),
        ({"loss": {"type": "grpo"}}, "loss.type=grpo learns from rewards; set reward"),
        (
            {"loss": {"type": "grpo"}, "reward": NUMERIC, "rollout": HF | {"n": 1}},
            "rollout.n=1: loss.type=grpo compares the rollouts of a prompt",
        ),
        (
            {"loss": {"type": "grpo"}, "reward": NUMERIC, "logging": {"gradients_every": 5}},
            "logging.gradients_every=5",
        ),
        (
            {"loss": {"type": "tcad"}, "reward": NUMERIC | {"weighting_beta": 1.0}},
            "loss.power_alpha and reward.weighting_beta both weigh rollouts; write loss.power_alpha=null",
        ),
        (
            {
                "teachers": [SAME, SAME | {"name": "b"}],
                "loss": {"type": "tcad"},
                "aggregation": {"type": "select_teacher"},
            },
            "loss.power_alpha weighs rollouts by the teacher's log-probability, and aggregation needs",
        ),
        (
            {"loss": {"type": "same_vocab", "scaling": "dynamic"}},
            "loss.scaling=dynamic scales KD by CE, which is computed on sequences of the dataset, and "
            "rollout.on_policy_share=1 uses none; write loss.scaling=fixed, or lower rollout.on_policy_share",
        ),
        (
            {"teachers": [CROSS], "loss": {"type": "tcad"}},
            "loss.type=tcad compares equal vocabularies, but teachers.0",
        ),
        (
            {"teachers": [CROSS], "loss": {"type": "grpo", "kd_weight": 0.1}, "reward": NUMERIC},
            "loss.type=grpo compares equal vocabularies",
        ),
        (
            {"loss": {"type": "sampled_kl"}, "rollout": SGLANG | {"top_p": 0.9}},
            "rollout.top_p=0.9: the loss weighs tokens by the probability with which they were sampled",
        ),
        (
            {"loss": {"type": "grpo"}, "reward": NUMERIC, "rollout": SGLANG | {"top_k": 20}},
            "rollout.top_k=20: the loss weighs tokens by the probability with which they were sampled",
        ),
        (
            {"loss": {"type": "grpo", "importance_level": "sequence"}, "reward": NUMERIC},
            "loss.importance_level=sequence without importance_cap: a product over hundreds of tokens has no bound",
        ),
        (
            {
                "loss": {
                    "type": "sampled_kl",
                    "estimator": "k2",
                    "update": "direct",
                    "importance_level": "sequence",
                    "importance_cap": 2.0,
                }
            },
            "loss.update=direct with importance_level=sequence: direct differentiates each token's estimate",
        ),
        ({"loss": {"type": "sampled_kl", "importance_veto": 1.0}}, "loss.importance_veto=1.0: must be less than 1"),
        ({"loss": {"type": "same_vocab", "importance_cap": 2.0}}, "loss.importance_cap"),
    ],
)
def test_conflicting_settings_are_refused(sections: dict[str, Any], message: str) -> None:
    assert message_of(on_policy(**sections)).startswith(message)


@pytest.mark.parametrize("section", [{"reward": NUMERIC}, {"environment": {"type": "calculator"}}])
def test_a_run_without_rollouts_has_no_settings_for_them(section: dict[str, Any]) -> None:
    key = next(iter(section))

    assert message_of(on_policy(rollout=None, **section)).startswith(
        f"{key} is for the student's samples, and this run samples nothing; add rollout=hf"
    )


@pytest.mark.parametrize(
    ("type_", "teacher"), [("grpo", SAME), ("sampled_kl", SAME), ("sampled_kl", CROSS)], ids=["grpo", "same", "cross"]
)
def test_losses_of_samples_need_rollouts(type_: str, teacher: dict[str, Any]) -> None:
    assert "add rollout=hf" in message_of(on_policy(rollout=None, loss={"type": type_}, teachers=[teacher]))


def test_sampled_kl_is_for_teachers_of_either_kind() -> None:
    config = from_dict(on_policy(loss={"type": "sampled_kl", "estimator": "k3"}, teachers=[CROSS, SAME]))

    for i in range(2):
        term = config.term(i)
        assert isinstance(term, SampledKLTerm)
        assert term.estimator == "k3"


@pytest.mark.parametrize("loss", [{"type": "same_vocab"}, {"type": "sampled_kl"}])
def test_sampling_settings_of_engines_are_allowed(loss: dict[str, Any]) -> None:
    """Catches a refused temperature, and refused top_p for SGLang with a loss without probability ratios."""
    cuts = {"top_p": 0.9} if loss["type"] == "same_vocab" else {}

    from_dict(on_policy(loss=loss, rollout=SGLANG | {"temperature": 0.6} | cuts))


def test_a_teacher_beside_grpo_is_an_exact_kl() -> None:
    """Bug: beside grpo, a teacher without a loss of its own does not use reverse KL over the whole vocabulary."""
    config = from_dict(on_policy(reward=NUMERIC, loss={"type": "grpo", "kd_weight": 0.1}))

    assert config.term(0) == SameVocabTerm(divergence="reverse_kl")
    assert config.active_names == ("same",)
    assert from_dict(on_policy(reward=NUMERIC, loss={"type": "grpo"})).active_teachers == ()
