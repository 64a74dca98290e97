"""Messages about invalid settings: the key as typed, the value, the reason and the remedy."""

import copy
import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from nemo_opd.config import RunConfig
from nemo_opd.config.loss import LossTerm, PKLTerm, SameVocabTerm
from nemo_opd.config.objective import Loss
from nemo_opd.config.run import from_dict
from nemo_opd.config.settings import choices
from nemo_opd.errors import OPDError
from tests.config.settings import HF, SAME, VALID, changed, message_of

TERMS, LOSSES = (
    ", ".join(repr(choice.model_fields["type"].default) for choice in choices(union)) for union in (LossTerm, Loss)
)


def test_the_smallest_config() -> None:
    config = from_dict(VALID)

    assert config.data.train.arrow_files == ("/a.arrow",)
    assert (config.student.dtype, config.teachers[0].dtype) == ("auto", "auto")
    assert (config.run.resume, config.cluster.placement, config.handoff.transport) == ("never", "colocated", "auto")


def test_settings_are_frozen_all_the_way_down() -> None:
    config = from_dict(VALID)

    for settings, key in ((config, "train"), (config.train, "max_steps"), (config.teachers[0], "weight")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(settings, key, None)
    hash(config)


def test_settings_that_name_their_own_keys_are_frozen_too() -> None:
    """Catches a dict that makes the settings unhashable or mutable, or that pickling loses."""
    config = from_dict(
        changed("teachers.0.roles", {"eos": ["<a>"], "x": ["<b>", "<a>"]})
        | {"student": {"model": "/m", "chat_template_kwargs": {"enable_thinking": False}}}
        | {"data": VALID["data"] | {"messages_key": "messages"}}
    )
    roles = config.teachers[0].roles
    assert roles == {"eos": ("<a>",), "x": ("<b>", "<a>")}
    assert config.teachers[0].roles_by_token == {"<a>": ("eos", "x"), "<b>": ("x",)}
    for change in (lambda: roles.update({}), lambda: roles.__setitem__("eos", ()), roles.clear):
        with pytest.raises(TypeError, match="frozen"):
            change()
    copied = pickle.loads(pickle.dumps(config))
    assert copied == config
    assert hash(copied) == hash(config)
    assert from_dict(config.model_dump(mode="json")) == config


def test_tools_need_conversations() -> None:
    assert "tools_key=fns without messages_key" in message_of(VALID | {"data": VALID["data"] | {"tools_key": "fns"}})


@pytest.mark.parametrize(
    ("typo", "suggestion"),
    [
        ("trian", "train"),
        ("train.max_step", "train.max_steps"),
        ("student.optimiser", "student.optimizer"),
        ("teachers.0.wieght", "teachers.0.weight"),
        ("loss.temprature", "loss.temperature"),
        ("data.train.arrow_file", "data.train.arrow_files"),
    ],
)
def test_a_typo_gets_a_suggestion(typo: str, suggestion: str) -> None:
    assert message_of(changed(typo, 3)) == f"{typo}=3: there is no such key; did you mean {suggestion}?"


def test_a_strange_key_lists_the_known_keys() -> None:
    message = message_of(changed("handoff", {"type": "logits", "zzz": 1}))

    assert message == "handoff.zzz=1: there is no such key; known here: transport, type"


def test_a_key_of_the_other_kind_of_teacher_is_told_with_its_kind() -> None:
    """Bug: a suggestion that ignores the teacher's type; same-tokenizer teachers have no projection."""
    message = message_of(changed("teachers.1.projection", "auto"))
    rollout = message_of(changed("rollout", {"type": "hf", "gpus": 2}))

    types = "teachers.1.type=auto, cross_tokenizer, cached, served"
    remedy = "write this type, or leave it out"
    assert message == f"teachers.1.projection='auto': there is no such key; it belongs to {types}; {remedy}"
    reason = f"there is no such key; it belongs to rollout.type=server; {remedy} (~rollout.gpus)"
    assert rollout == f"rollout.gpus=2: {reason}"


def test_a_key_of_the_other_loss_is_unknown() -> None:
    data = changed("loss", {"type": "same_vocab", "coverage_coef": 1.0}) | {"teachers": [SAME]}

    assert message_of(data).startswith("loss.coverage_coef=1.0: there is no such key")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("train.max_steps", "three", "train.max_steps='three': must be a valid integer"),
        ("train.max_steps", 0, "train.max_steps=0: must be greater than or equal to 1"),
        ("train.global_batch_size", None, "train.global_batch_size=null: must be a valid integer"),
        ("data.text_key", None, "data.text_key=null: must be a valid string; leave it out (~data.text_key)"),
        ("train.max_steps", True, "train.max_steps=true: must be a number, not true or false"),
        ("student.optimizer.betas", [True, 0.9], "student.optimizer.betas=[true, 0.9]: must be a number, not true"),
        ("evaluation.sets.a.n", True, "evaluation.sets.a.n=true: must be a number, not true or false"),
        ("train.save_before", -3, "train.save_before=-3: must be a time above 0, such as 03:45:00, or a number of"),
        ("train.save_before", "noon", "train.save_before='noon': must be a time above 0"),
        ("train.gradient_clip", 0, "train.gradient_clip=0: must be greater than 0"),
        ("student.optimizer.lr", float("nan"), "student.optimizer.lr=nan: must be a finite number"),
        ("student.optimizer.betas", [0.9], "student.optimizer.betas.1: required, but not given"),
        ("student.optimizer.betas", [0.9, 1.0], "student.optimizer.betas.1=1.0: must be less than 1"),
        ("student.dtype", "fp8", "student.dtype='fp8': must be 'auto', 'bfloat16' or 'float32'"),
        ("student.optimizer", "adamw", "student.optimizer='adamw': a group of keys, not one value; set"),
        ("loss.beta", 1.5, "loss.beta=1.5: must be less than or equal to 1"),
        ("teachers.1.weight", -0.5, "teachers.1.weight=-0.5: must be greater than or equal to 0"),
        ("teachers.0.name", "a b", "teachers.0.name='a b': must be letters, digits"),
        ("run.name", "a/b", "run.name='a/b': must be letters, digits"),
        ("run.name", 2024, "run.name=2024: must be a valid string; to make text of it, write run.name=\"'2024'\""),
        ("run.resume", "yes", "run.resume='yes': must be 'auto' or 'never'"),
        ("data.train.arrow_files", 7, "data.train.arrow_files=7: must be a list"),
        ("data.train.arrow_files", ["/a", 7], "data.train.arrow_files.1=7: must be a valid string"),
        ("teachers", [], "teachers=[]: "),
        ("teachers", 3, "teachers=3: "),
        ("teachers.0", 7, "teachers.0=7: a group of keys, not one value; set teachers.0.KEY of model, "),
    ],
)
def test_a_wrong_value(key: str, value: Any, says: str) -> None:
    message = message_of(changed(key, value))

    assert message.startswith(says)
    assert len(message.splitlines()) == 1
    assert "pydantic" not in message


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("loss.type", LOSSES),
        ("teachers.0.type", "'auto', 'same_tokenizer', 'cross_tokenizer', 'cached', 'served'"),
        ("teachers.0.loss", TERMS),
    ],
)
def test_a_wrong_tag_is_told_the_choices(key: str, choices: str) -> None:
    if key.endswith("loss"):
        data, key = changed(key, {"type": "nope"}), f"{key}.type"
    else:
        data = changed(key, "nope")

    assert message_of(data) == f"{key}='nope': choose one of {choices}"


def test_a_function_in_place_of_a_type() -> None:
    message = message_of(VALID | {"rollout": HF, "reward": {"type": "rewards:mine"}})
    assert message.endswith("; for your own function, write reward.type=function reward.function=rewards:mine")


def test_a_key_that_is_called_like_the_tag() -> None:
    """Bug: reward.type=function has a key `function`, and messages about other keys named it."""
    reward = {"type": "function", "function": "rewards:mine"}

    def refused(**more: object) -> str:
        return message_of(VALID | {"rollout": HF, "reward": reward | more})

    assert refused(timeout_s=3).startswith("reward.timeout_s=3: there is no such key")
    assert refused(call_timeout_s=-1).startswith("reward.call_timeout_s=-1: must be greater than 0")
    assert refused(function=3).startswith("reward.function=3: must be")


def test_a_tag_that_is_missing() -> None:
    message = message_of(changed("rollout", {"n": 2}))
    assert message == "rollout.type: required, but not given; choose one of 'hf', 'server'"


@pytest.mark.parametrize("key", ["student", "teachers", "data", "train"])
def test_a_section_that_is_missing(key: str) -> None:
    data = copy.deepcopy(VALID)
    del data[key]

    assert message_of(data) == f"{key}: required, but not given"


def test_every_problem_has_a_line() -> None:
    data = changed("train.max_steps", 0)
    data["teachers"][0]["wieght"] = 1
    data["run"] = {"seed": -1}

    assert sorted(line.partition(":")[0] for line in message_of(data).splitlines()) == [
        "run.seed=-1",
        "teachers.0.wieght=1",
        "train.max_steps=0",
    ]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("cluster.teacher_ranks", "abc", "cluster.teacher_ranks='abc': must be a valid integer or a list"),
        ("cluster.teacher_ranks", [1, "x"], "cluster.teacher_ranks.1='x': must be a valid integer"),
        ("student.lora", {"target_modules": 5}, "student.lora.target_modules=5: must be 'all-linear' or a list"),
        (
            "student.chat_template_kwargs",
            {"a": [1]},
            "student.chat_template_kwargs.a=[1]: must be true or false or a ",
        ),
        ("teachers", [SAME | {"weight": -1}], "teachers.0.weight=-1: must be greater than or equal to 0"),
        ("data", {"packing": "maybe"}, "data.packing='maybe': must be true or false"),
    ],
)
def test_one_wrong_value_is_one_problem(key: str, value: Any, says: str) -> None:
    """Bug: a line for each type of a union, and for the length of the list around the value."""
    message = message_of(changed(key, value))

    assert message.startswith(says)
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    "key",
    [
        "student.model",
        "train.max_steps",
        "data.train.arrow_files",
        "run.name",
        "cluster.device",
        "handoff.type",
    ],
)
def test_an_empty_value_is_called_empty(key: str) -> None:
    """Bug: with `key=$UNSET`, the current folder counts as the model."""
    assert message_of(changed(key, "")).startswith(f"{key}: it is empty; write a value, or leave the key out")


def test_it_is_one_of_our_errors_and_a_value_error() -> None:
    for kind in (OPDError, ValueError):
        with pytest.raises(kind):
            from_dict({})


def test_steps_or_epochs() -> None:
    assert message_of(changed("train", {})).startswith("train: neither max_steps nor epochs is set")
    both = message_of(changed("train.epochs", 2))
    assert both.startswith("train.max_steps=3 and epochs=2 are both set")
    assert both.endswith("write train.max_steps=null or train.epochs=null")
    assert from_dict(changed("train", {"epochs": 2})).train.epochs == 2


def test_null_is_no_validation() -> None:
    """Bug: the user has to reset files and limit one by one."""
    config = from_dict(changed("data.validation", None))
    assert not config.data.validation.given
    assert from_dict(config.model_dump(mode="json")) == config


def test_one_kind_of_source() -> None:
    assert message_of(changed("data.train.jsonl_files", "/b.jsonl")) == (
        "data.train: give one kind of source, not arrow_files=/a.arrow and jsonl_files=/b.jsonl; set the unused "
        "ones to null (as arrow_files=null)"
    )
    data = changed("data.train.jsonl_files", "/b.jsonl")
    data["data"]["train"]["arrow_files"] = None
    assert from_dict(data).data.train.given == {"jsonl_files": ("/b.jsonl",)}


def test_teacher_names_are_unique() -> None:
    message = message_of(changed("teachers.1.name", "cross"))

    assert message == "teachers: 2 teachers are named 'cross'; metrics need one name each"
    message = message_of(changed("teachers.1.name", "student"))
    assert message == "teachers.1.name=student: the student has this name; write another"


def test_cross_tokenizer_teachers_need_a_cross_tokenizer_loss() -> None:
    shared = message_of(changed("loss", {"type": "same_vocab"}))
    assert shared.startswith(
        "loss.type=same_vocab compares equal vocabularies, but teachers.0 (cross) is of type cross"
    )
    assert "use loss=p_kl" in shared
    assert message_of(changed("teachers.0.loss", {"type": "same_vocab"})).startswith("teachers.0.loss.type=same_vocab")

    with_own_loss = changed("loss", {"type": "same_vocab"})
    with_own_loss["teachers"][0]["loss"] = {"type": "p_kl"}
    assert from_dict(with_own_loss).term(0).type == "p_kl"


def test_truncated_support_needs_top_k() -> None:
    run_message = message_of(changed("loss", {"type": "same_vocab", "support": "union"}) | {"teachers": [SAME]})
    assert run_message == ("loss.top_k: required with support=union; give the number of tokens per side, such as 256")
    teacher_message = message_of(changed("teachers.1.loss", {"type": "same_vocab", "support": "teacher_topk"}))
    assert teacher_message.startswith("teachers.1.loss.top_k: required with support=teacher_topk")


def test_a_preset_decides_its_own_settings() -> None:
    """Bug: a setting beside the preset is ignored."""
    for preset, setting in (
        ({"compat": "nemo_rl"}, {"coverage_coef": 0.5}),
        ({"compat": "nemo_rl"}, {"merge": "first"}),
    ):
        (key,) = setting
        message = message_of(changed("teachers.0.loss", {"type": "p_kl", **preset, **setting}))
        assert (
            message == f"teachers.0.loss.{key}={setting[key]} has no effect with compat=nemo_rl; "
            "leave one of the two out, or write null"
        )
    message = message_of(changed("teachers.0.loss", {"type": "p_kl", "compat": "trl"}))
    assert message.endswith("must be 'nemo_rl'; 'trl' is for teachers.0.loss.type=gold, h_kl, uld")


def test_top_k_needs_a_truncated_support() -> None:
    """Bug: the loss covers the whole vocabulary although the user set top_k."""
    message = message_of(changed("teachers.1.loss", {"type": "same_vocab", "top_k": 64}))
    assert message.startswith("teachers.1.loss.top_k=64 has no effect with support=full; write teachers.1.loss.")
    assert message_of(changed("teachers.1.loss", {"type": "same_vocab", "support": "union", "top_k": 0})).startswith(
        "teachers.1.loss.top_k=0: must be greater than or equal to 1"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"positions": "all", "divergence": "jsd"},
            "loss.ends=drop with divergence=jsd: these targets are exact only in the mean over texts, so the "
            "divergence must be linear in them; write ends=cover, or divergence=forward_kl",
        ),
        ({"ends": "rest"}, "loss.ends=rest has no effect with positions=starts; write loss.positions=all"),
        ({"positions": "all", "continuation_weight": 0.5}, "loss.positions=all with continuation_weight=0.5: positi"),
    ],
)
def test_targets_that_the_other_settings_rule_out(settings: dict[str, Any], message: str) -> None:
    """Catches a biased target, and a setting without effect."""
    assert message_of(changed("loss", {"type": "byte_prefix", **settings})).startswith(message)
    accepted = {"positions": "all", "ends": "cover", "divergence": "jsd", "pieces": "spelling"}
    from_dict(changed("loss", {"type": "byte_prefix", **accepted}))


def test_a_wrong_support_is_one_problem() -> None:
    """Bug: a rule about two keys adds a message although one value is invalid."""
    message = message_of(changed("teachers.1.loss", {"type": "same_vocab", "support": "topk", "top_k": 64}))
    assert message.startswith("teachers.1.loss.support='topk': must be 'full', 'teacher_topk'")
    assert len(message.splitlines()) == 1


def test_support_reaches_the_term_of_a_same_tokenizer_teacher() -> None:
    support = {"support": "student_topk", "top_k": 8, "normalization": "rest"}
    config = from_dict(changed("loss", {"type": "same_vocab", **support}) | {"teachers": [SAME]})
    assert config.term(0) == SameVocabTerm(**support)


def test_something_is_trained_on() -> None:
    loss = {"type": "p_kl", "kd_weight": 0, "ce_weight": 0}
    assert message_of(changed("loss", loss)).startswith("loss.kd_weight and loss.ce_weight are both 0")


def test_teachers_that_all_weigh_nothing() -> None:
    """Bug: the teachers were loaded, and the run was plain cross-entropy."""
    weightless = changed("loss", {"type": "p_kl"})
    for teacher in weightless["teachers"]:
        teacher["weight"] = 0
    assert message_of(weightless).startswith("every teacher's weight is 0")
    weightless["teachers"][0]["weight"] = 1
    assert from_dict(weightless).active_teachers
    assert not from_dict(weightless | {"loss": {"type": "p_kl", "kd_weight": 0}}).active_teachers


def test_teachers_without_a_say_are_not_loaded() -> None:
    config = from_dict(changed("loss", {"type": "p_kl", "kd_weight": 0}))

    assert config.active_teachers == ()
    assert len(config.teachers) == 2


def test_terms_follow_the_tokenizers() -> None:
    """Catches the run's loss in place of a teacher's, and a wrong translation to same_vocab for equal vocabularies."""
    loss = {"type": "p_kl", "divergence": "jsd", "beta": 0.2, "temperature": 2.0, "coverage_coef": 0.3}
    data = changed("loss", loss)
    config = from_dict(data)
    shared = {"divergence": "jsd", "beta": 0.2, "temperature": 2.0}

    cross, same = config.term(0), config.term(1)
    assert isinstance(cross, PKLTerm)
    assert cross.coverage_coef == 0.3
    assert same == SameVocabTerm(**shared)

    data["teachers"][1]["loss"] = {"type": "same_vocab", "temperature": 4.0}
    assert from_dict(data).term(1) == SameVocabTerm(temperature=4.0)


def test_a_teacher_with_the_students_tokenizer_does_not_take_the_temperature_of_alm() -> None:
    """Bug: alm's temperature of 100 divided the logits, and multiplied the term by 10,000."""
    assert from_dict(changed("loss", {"type": "alm"})).term(1) == SameVocabTerm()


def test_defaults_are_valid() -> None:
    """Bug: a default violates its own bounds, which no other test notices."""
    assert RunConfig.model_config["validate_default"]
    assert from_dict(from_dict(VALID).model_dump()) == from_dict(VALID)


def test_a_seed_that_no_generator_takes() -> None:
    """Bug: torch's overflow traceback after the models have loaded."""
    assert "run.seed" in message_of(changed("run.seed", 10**20))
    assert from_dict(changed("run.seed", 2**62)).run.seed == 2**62


def test_keys_below_a_users_name_are_known() -> None:
    """Bugs: no suggestion for a typo in a named set of questions; the message's key cannot be typed."""
    questions = {"data": {"jsonl_files": "x"}, "reward": {"type": "exact"}}
    message = message_of(changed("evaluation", {"sets": {"a": questions | {"max_new_token": 1}}}))
    assert message.endswith("there is no such key; did you mean evaluation.sets.a.max_new_tokens?")
    message = message_of(changed("evaluation", {"sets": {"a": questions | {"n": 2, "k": [4]}}}))
    assert message.startswith("evaluation.sets.a.k=[4]: ")
