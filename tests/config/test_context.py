"""Messages about invalid contexts: key, value, reason and remedy."""

from typing import Any

import pytest

from nemo_opd.config.composition import from_yaml, to_yaml
from nemo_opd.config.run import from_dict
from nemo_opd.config.teacher import Context, field_names, filled
from tests.config.settings import SAME, VALID, message_of, on_policy

HINT = {"template": "{prompt} {hint}"}
CHAT = {"messages_key": "messages"}


def with_context(context: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return on_policy(teachers=[SAME | {"context": context}], **sections)


def test_a_valid_run_survives_its_own_config(tmp_path: Any) -> None:
    context = {"template": "{prompt}\n{{{hint}}}", "system_prompt": "{style}", "gap_every": 5, "contrast": True}
    config = from_dict(with_context(context, data=CHAT))
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")

    assert from_yaml(tmp_path / "config.yaml") == config
    assert config.teachers[0].context is not None
    assert config.teachers[0].context.fields == ("style", "hint")


def test_a_template_is_filled_as_python_does() -> None:
    template = "{{a}} {hint}{prompt} {hint}"
    assert field_names(template) == ["hint", "prompt", "hint"]
    assert filled(template, {"hint": "{x}", "prompt": "p"}) == template.format(hint="{x}", prompt="p")
    assert Context(key="own", system_prompt="{a b}").fields == ("own", "a b")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            with_context({"template": "{{x}} hello"}),
            "teachers.0.context.template: '{{x}} hello' names nothing, so the teacher",
        ),
        (
            with_context({}),
            "teachers.0.context: it does not say what the teacher reads; set template, key or system_prompt",
        ),
        (
            with_context(HINT | {"key": "own"}),
            "key=own has no effect with template={prompt} {hint}; leave one of the two out",
        ),
        (with_context({"template": "{hint"}), "write {{ and }} for braces that are text"),
        (with_context({"template": "{}"}), "{} in '{}' is not a field's name; write the name alone, as {solution}"),
        (with_context({"template": "{hint:>9}"}), "is not a field's name"),
        (
            with_context(HINT | {"contrast": True}),
            "contrast=true has no effect without gap_every; set teachers.0.context.",
        ),
        (
            with_context({"template": "Think. {prompt}", "gap_every": 1, "contrast": True}),
            "contrast=true: the context names no field of the record, so it is the same for another record",
        ),
        (
            VALID | {"teachers": [SAME | {"context": HINT}], "loss": {"type": "same_vocab"}},
            "teachers.0.context: the texts of data.text_key=text have no prompt that a context could replace",
        ),
        (
            with_context({"system_prompt": "Think."}),
            "teachers.0.context.system_prompt: prompts of data.text_key=text are texts, which have no system message",
        ),
        (
            with_context(HINT, data={"train": {"text_files": "/a.txt"}}),
            "teachers.0.context.template names the column 'hint', and text_files have none",
        ),
        (
            with_context({"template": "{text} {hint}"}),
            "teachers.0.context.template names the column 'text', which data.text_key names too; write {prompt}",
        ),
        (
            with_context({"key": "messages"}, data=CHAT),
            "teachers.0.context.key names the column 'messages', which data.messages_key names too",
        ),
    ],
)
def test_invalid_contexts_are_refused(data: dict[str, Any], message: str) -> None:
    assert message in message_of(data)


def test_a_teacher_with_a_context_has_a_template_of_its_own() -> None:
    """Bug: the teacher's template settings are refused, as for a teacher that reads the student's ids."""
    settings = {"context": HINT, "chat_template_kwargs": {"enable_thinking": False}}
    assert from_dict(on_policy(teachers=[SAME | settings], data=CHAT)).teachers[0].context is not None
