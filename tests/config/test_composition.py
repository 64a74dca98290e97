"""Every YAML in configs/ composes into valid settings, and the recipes keep their main settings."""

from itertools import product

import pytest
import yaml

from nemo_opd.config.composition import to_yaml
from nemo_opd.config.run import from_dict
from tests.composition import CONFIGS, DEMO, PRODUCTION, compose, configured

RUNS = sorted(file.stem for file in CONFIGS.glob("*.yaml") if not file.stem.startswith("evaluation"))
EVALUATIONS = sorted(file.stem for file in CONFIGS.glob("evaluation*.yaml"))
OPTIONS = sorted(f"{file.parent.name}={file.stem}" for file in CONFIGS.glob("*/*.yaml"))
DEMOS = ("off_policy_demo", "on_policy_demo")
"""Recipes that every option is tried on."""
ON_POLICY_GROUPS = ("rollout=", "reward=", "environment=", "evaluation=")
ON_POLICY_OPTIONS = ("loss=dpca", "loss=grpo", "loss=policy_gradient")
"""Losses that need a student that samples."""
OF_ONE_TOKENIZER = ("loss=same_vocab", "loss=reverse_kl", "loss=jsd", "loss=tcad", "loss=policy_gradient")
CROSS_TOKENIZER = (
    "demo_multi",
    "demo_single",
    "phi4mini_llama3b",
    "qwen3_4b",
    "qwen2_5_7b",
    "arithmetic_cross",
    "arithmetic_multi",
)
CONVERSATIONS = ("data.messages_key=messages", "data.response_key=null")
NEEDED = {
    "aggregation=averaged_logits": ["teachers.0.type=same_tokenizer"],
    "environment=calculator": [*CONVERSATIONS],
    "reward=environment": [*CONVERSATIONS, "environment=calculator", "reward.answer_key=answer"],
    "reward=function": ["reward.function=package.module:name"],
    "loss=function": ["loss.function=package.module:name"],
}
"""Overrides that an option needs."""
NEEDED_BY_RECIPE = {
    "off_policy": {
        **{option: ["teachers.0.loss.type=p_kl"] for option in OF_ONE_TOKENIZER},
        "data=arithmetic": ["data.response_key=null"],
        **{f"teachers=arithmetic_{kind}": ["data.messages_key=messages"] for kind in ("context", "self")},
    },
    "on_policy": {
        **{f"aggregation={kind}": ["teachers=demo_multi", "loss=p_kl"] for kind in ("routed", "select_teacher")},
        "aggregation=averaged_logits": ["teachers=demo_multi", "teachers.0.type=same_tokenizer"],
        **{f"teachers={name}": ["loss=p_kl"] for name in CROSS_TOKENIZER},
        **{f"loss={name}": ["teachers=demo_multi"] for name in ("bpm", "dpca", "strict_16")},
    },
}
"""The off-policy recipes have a cross-tokenizer teacher, and the on-policy ones a single teacher."""


def suits(name: str, option: str) -> bool:
    return recipe(name) == "on_policy" or not option.startswith(ON_POLICY_GROUPS + ON_POLICY_OPTIONS)


def recipe(name: str) -> str:
    return name[: name.index("_policy") + len("_policy")]


def test_all_files_are_covered() -> None:
    """Catches a `.yml` or a deeper folder, which no test composes."""
    counted = len(RUNS) + len(EVALUATIONS) + len(OPTIONS)
    assert counted == len([file for file in CONFIGS.rglob("*") if file.is_file() and file.parent != CONFIGS / "schema"])
    assert {DEMO, PRODUCTION} <= set(RUNS)


@pytest.mark.parametrize(("name", "option"), [pair for pair in product(DEMOS, OPTIONS) if suits(*pair)])
def test_an_option_of_a_group_composes(name: str, option: str) -> None:
    needed = [*NEEDED.get(option, []), *NEEDED_BY_RECIPE[recipe(name)].get(option, [])]
    compose(option, *needed, config_name=name)


def test_composing_by_steps_is_what_a_command_line_does() -> None:
    """Bug: tests/composition.py sets keys differently than Hydra, so that its tests see wrong settings."""
    keys = ("loss.temperature=2", "teachers.0.weight=0.5", "train.max_steps=3", "evaluation=null")
    arguments = ("teachers=demo_single", "loss=gold", *keys)
    assert compose(*arguments) == configured(*arguments)


@pytest.mark.parametrize("name", RUNS)
def test_a_resolved_config_says_everything(name: str) -> None:
    """Bug: a run's config.yaml lacks a default, or gives different settings."""
    config = compose("run.output_dir=/runs/a", config_name=name)
    written = yaml.safe_load(to_yaml(config))

    assert from_dict(written) == config
    assert to_yaml(from_dict(written)) == to_yaml(config)
    assert {"betas", "eps", "lr"} <= written["student"]["optimizer"].keys()


def test_the_production_recipe() -> None:
    config = compose(config_name=PRODUCTION)

    assert config.student.model == "meta-llama/Llama-3.2-1B"
    assert [(teacher.model, teacher.type) for teacher in config.teachers] == [
        ("microsoft/Phi-4-mini-instruct", "cross_tokenizer"),
        ("meta-llama/Llama-3.2-3B", "same_tokenizer"),
    ]
    assert [config.term(i).type for i in range(2)] == ["p_kl", "same_vocab"]
    assert config.data.train.given == {}
    assert yaml.safe_load((CONFIGS / "data" / "files.yaml").read_text())["train"] == {"arrow_files": None}


def test_the_demo_needs_nothing_from_outside() -> None:
    config = compose(config_name=DEMO)
    references = [config.student.model, *(teacher.model for teacher in config.teachers)]

    assert all(reference.startswith("demo:") for reference in references)
    assert config.data.train.arrow_files == ("demo:train",)
    assert not config.logging.wandb.enabled
