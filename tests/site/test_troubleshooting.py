"""docs/troubleshooting.md shows each kind of error with its real message."""

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from nemo_opd import errors
from nemo_opd.config import RunConfig
from nemo_opd.config.composition import compose_settings
from nemo_opd.errors import OPDError
from nemo_opd.preflight.inputs import check_inputs
from tests.composition import CONFIGS, DEMO
from tests.site.pages import DOCS, ROOT

TEXT = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = {part.splitlines()[0]: part for part in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]}
KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, OPDError) and kind is not OPDError
]
RUNS = [
    (name, *run) for name, part in SECTIONS.items() for run in re.findall(r"^\$ (.*)\nerror: (.*)$", part, re.MULTILINE)
]
MESSAGES = [
    (name, message)
    for name, part in SECTIONS.items()
    for block in re.findall(r"^```text\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    for message in re.findall(r"^error: (.*)$", block, re.MULTILINE)
]


def test_each_kind_of_error_is_there() -> None:
    assert {kind.__name__ for kind in KINDS} <= set(re.findall(r"`(\w+Error)`", TEXT))
    assert len(RUNS) > 4
    assert len(MESSAGES) > 8


@pytest.mark.parametrize(("kind", "command", "message"), RUNS, ids=[command for _, command, _ in RUNS])
def test_a_command_fails_as_is_shown(
    kind: str, command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program, verb, *overrides = shlex.split(command)
    assert (program, verb) == ("nemo-opd", "distil")
    with pytest.raises(getattr(errors, kind)) as raised:
        check_inputs(compose_settings(overrides, RunConfig, CONFIGS, DEMO), on_policy=False)
    assert str(raised.value) == message


@pytest.mark.parametrize(("kind", "message"), MESSAGES, ids=[message[:60] for _, message in MESSAGES])
def test_a_message_is_one_of_the_code(kind: str, message: str) -> None:
    """Bug: the code's message has changed, or belongs to another kind of error."""
    kinds = {error.__name__ for error in KINDS if issubclass(error, getattr(errors, kind))}
    assert any(form.fullmatch(message) for name, form in forms() if name in kinds)


@cache
def forms() -> list[tuple[str, re.Pattern[str]]]:
    """Return an error's name and a pattern of its message, for all calls with a literal text."""
    return [form for file in (ROOT / "nemo_opd").rglob("*.py") for form in _forms(ast.parse(file.read_text("utf-8")))]


def _forms(tree: ast.Module) -> Iterator[tuple[str, re.Pattern[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            yield node.func.id, _form(node.args[0])
        elif isinstance(node, ast.ClassDef):  # a class whose methods return the message
            yield from (
                (node.name, _form(part.value)) for part in ast.walk(node) if isinstance(part, ast.Return) and part.value
            )


def _form(text: ast.expr) -> re.Pattern[str]:
    """Return a pattern of an expression's texts; it matches nothing if the expression has no literal words."""
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    written = [part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else None for part in parts]
    if sum(len(part) for part in written if part) < 10:
        return re.compile(r"(?!)")
    return re.compile("".join(".+" if part is None else re.escape(part) for part in written), re.DOTALL)
