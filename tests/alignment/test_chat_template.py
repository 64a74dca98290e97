"""Messages in the form that a template reads, for small templates with the structure of public ones."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nemo_opd.alignment import ChatRenderer, templates
from nemo_opd.alignment.chat_template import ChatTemplate, content_text, plain_messages
from nemo_opd.errors import AlignmentError
from tests.alignment.chat_fixture import with_template
from tests.tokenizers_fixture import byte_level

HEAD = "{% for m in messages %}<{{ m.role }}>"
END = "<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ ARGUMENTS }}]{% endfor %}"
AS_JSON = CALLS.replace("ARGUMENTS", "c.function.arguments | tojson")
AS_TEXT = CALLS.replace("{{ ARGUMENTS }}", "{{ '~' + c.function.arguments }}")
PRINTED = CALLS.replace("ARGUMENTS", "c.function.arguments")
ITEMS = CALLS.replace("ARGUMENTS", "c.function.arguments.items() | list")
WITHOUT_CONTENT = "{% if m.content is none %}" + AS_JSON + "{% else %}{{ m.content }}{% endif %}"


def chat(arguments: Any, content: Any = None) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content, "tool_calls": [call]}]


def rendered(body: str, messages: list[dict[str, Any]]) -> str:
    template = ChatTemplate(with_template(byte_level(), HEAD + body + END), {})
    return pickle.loads(pickle.dumps(template)).render(plain_messages(messages))


LOOPS = "".join(f"{{% for i{n} in range(99999) %}}" for n in range(4)) + "{% endfor %}" * 4
PAIRS = (
    "{% set x = namespace(a=(1,), b=(1,)) %}"
    "{% for i in range(60) %}{% set x.a = (x.a, x.a) %}{% set x.b = (x.b, x.b) %}{% endfor %}"
)
"""Comparing the two takes 2^60 operations."""


@pytest.mark.parametrize(
    "body",
    [LOOPS, "{{ 9 ** (9 ** 9) }}", PAIRS + "{{ x.a == x.b }}"],
    ids=["loops", "power", "comparison"],
)
def test_a_template_that_runs_forever_is_ended_in_any_thread(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a single operation blocks the interpreter, and the run, without end."""
    tokenizer = with_template(byte_level(), HEAD + "{{ m.content }}" + END)
    assert rendered("{{ m.content }}", chat("{}")[:1])
    renderer = ChatRenderer(tokenizer)
    tokenizer.chat_template = HEAD + "{{ m.content }}" + body + END
    with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(templates, "TEMPLATE_S", 0.5)
        with pytest.raises(AlignmentError, match=r"did not return in 0\.5 s of processor time"):
            pool.submit(renderer.render, [{"role": "user", "content": "Hi"}]).result()
    assert rendered("{{ m.content }}", chat("{}")[:1]), "templates can be used afterwards"


@pytest.mark.parametrize("body", ["{{ '%4000000000d' | format(1) }}", PAIRS.replace("(x.a, x.a)", "x.a + x.a")])
def test_a_template_that_fills_the_memory_is_ended(body: str) -> None:
    """Bug: a model's chat template takes all of the machine's memory."""
    tokenizer = with_template(byte_level(), HEAD + body + END)
    with pytest.raises(AlignmentError, match=r"the chat template of .* needs more than 1 GiB of memory; set a chat_"):
        ChatRenderer(tokenizer).render([{"role": "user", "content": "Hi"}])


def test_a_template_that_writes_a_bomb_is_refused() -> None:
    """Bug: megabytes rendered from a short conversation are tokenized, which takes gigabytes."""
    tokenizer = with_template(byte_level(), HEAD + "{{ 'a b ' * 7500000 }}" + END)
    with pytest.raises(AlignmentError, match="writes more than 16 times the text that it gets"):
        ChatRenderer(tokenizer).render([{"role": "user", "content": "Hi"}])


def test_half_of_a_surrogate_pair_is_refused() -> None:
    """Bug: the tokenizer raises a TypeError."""
    tokenizer = with_template(byte_level(), HEAD + "{{ m.content }}{{ '\\ud800' }}" + END)
    with pytest.raises(AlignmentError, match=r"refuses messages\[0\] .*surrogates not allowed"):
        ChatRenderer(tokenizer).render([{"role": "user", "content": "Hi"}])


def test_small_sums_are_rendered() -> None:
    """Bug: templates that count or draw a line are refused."""
    text = rendered(
        "{{ 2 ** 3 }}{{ '-' * loop.index * 3 }}{{ dict(a=1, **{}).a * 2 }}{{ (loop.index / 3) | round(2) }}",
        chat("{}")[:1],
    )
    assert "8---20.33" in text


@pytest.mark.parametrize("arguments", [{"city": "Zürich", "n": None}, '{"city": "Zürich", "n": null}'])
@pytest.mark.parametrize(
    ("body", "written"),
    [
        ("{{ m.content or '' }}" + AS_JSON, '[f {"city": "Zürich", "n": null}]'),
        ("{{ m.content or '' }}" + AS_TEXT, '[f ~{"city": "Zürich", "n": null}]'),
        ("{{ m.content or '' }}" + PRINTED, '[f {"city": "Zürich", "n": null}]'),
        ("{{ m.content or '' }}" + ITEMS, "[f [('city', 'Zürich'), ('n', None)]]"),
        (WITHOUT_CONTENT, '[f {"city": "Zürich", "n": null}]'),
        (WITHOUT_CONTENT.replace("[{{", "[{{ '' ~").replace(AS_JSON, AS_TEXT), '[f {"city": "Zürich", "n": null}]'),
    ],
    ids=["json", "text", "printed", "mapping", "none", "none_as_text"],
)
def test_arguments_are_written_as_one_object(arguments: Any, body: str, written: str) -> None:
    """Bug: JSON text is encoded twice, or text or objects are refused by templates that read the other form."""
    assert rendered(body, chat(arguments)) == f"<user>Hi<end><assistant>{written}<end>"


@pytest.mark.parametrize("text", ["", "Bern", "[1]", '{"a": "\\ud800"}', "{" * 5000, "1"])
def test_arguments_that_are_no_object_stay_text(text: str) -> None:
    """Bugs: the user's text is replaced by a list or cut; a surrogate that tokenizers refuse."""
    assert plain_messages(chat(text))[1]["tool_calls"][0]["function"]["arguments"] == text


def test_values_of_arguments_stay() -> None:
    """Bugs: nulls are dropped, large integers become floats, keys are sorted."""
    text = '{"z": null, "n": 12345678901234567890123, "a": {"b": [null]}, "day": "2024-01-01"}'
    arguments = plain_messages(chat(text))[1]["tool_calls"][0]["function"]["arguments"]
    assert list(arguments.items()) == [
        ("z", None),
        ("n", 12345678901234567890123),
        ("a", {"b": [None]}),
        ("day", "2024-01-01"),
    ]


def test_keys_that_are_null_are_left_out() -> None:
    """Bug: `'tool_calls' in message` is true for a message without calls."""
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": {"a": None}, "strict": None}}
    message = {"role": "assistant", "content": None, "name": None, "tool_calls": [call]}
    (plain,) = plain_messages([message])
    function = {"name": "f", "arguments": {"a": None}}
    assert plain == {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    assert content_text(plain) == ""


@pytest.mark.parametrize("calls", ["f()", [1], {"name": "f"}])
def test_calls_that_are_no_list_of_objects_are_refused(calls: Any) -> None:
    """Bug: an AttributeError."""
    with pytest.raises(AlignmentError, match=r"messages\[0\]\.tool_calls is .* must be a list of calls"):
        plain_messages([{"role": "assistant", "content": "", "tool_calls": calls}])


@pytest.mark.parametrize(
    "body",
    [
        "{{ m.content }}",
        "{{ '' + m.content }}",
        "{{ m.content | trim }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content | tojson }}{% endif %}",
        "{{ m['content'].strip() }}",
    ],
    ids=["printed", "added", "trimmed", "json", "method"],
)
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_a_content_of_none_is_empty_if_a_template_would_write_the_word(body: str, role: str) -> None:
    """Bug: the student learns to write None or null."""
    assert rendered(body, [{"role": "user", "content": "Hi"}, {"role": role, "content": None}]).endswith(
        f"<{role}><end>"
    )


def test_a_template_that_fails_on_none_in_one_place_is_given_an_empty_content() -> None:
    """Bug: the conversation is refused, because the probes have no message in this place."""
    body = "{% if loop.index > 2 %}{{ m.content.strip() }}{% endif %}" + WITHOUT_CONTENT
    assert rendered(body, [*chat({}), *chat({})]).endswith("<assistant><end>")


def test_contents_are_parts_for_a_template_that_writes_parts_alone() -> None:
    """Bug: an empty conversation, as from the templates of Idefics3 and SmolVLM."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [{"type": "text", "text": "Yo"}]}]
    parts = "{% for p in m.content %}{{ p.text }}{% endfor %}"
    assert rendered(parts, messages) == "<user>Hi<end><assistant>Yo<end>"
    either = "{% if m.content is string %}{{ m.content }}{% else %}PARTS" + parts + "{% endif %}"
    assert rendered(either, messages) == "<user>Hi<end><assistant>Yo<end>"


def test_parts_are_learned() -> None:
    """Bug: a conversation rendered from parts has no token to learn."""
    body = "{% for p in m.content %}{{ p.text }}{% endfor %}"
    tokenizer = with_template(byte_level(), HEAD + body + END)
    read = ChatRenderer(tokenizer)([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}])
    assert "Yo" in tokenizer.decode(read.ids[read.assistant_mask])
