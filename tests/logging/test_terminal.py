"""Texts with escape sequences for the terminal: titles, the clipboard, cursor moves, hidden lines."""

import io
import json
import logging
import sys

import pytest
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from nemo_opd.cli.command import exit_status
from nemo_opd.errors import RolloutError
from nemo_opd.logging.terminal import VisibleConsole, print_line, visible_json

ATTACK = "a\x1b]52;c;cm0gLXJmIH4=\x07b\x1b[2J\x1b[1;1Hc\x08\x7f\x9b31md"
OBEYED = {*map(chr, (*range(0x20), *range(0x7F, 0xA0)))} - {"\n", "\t"}


def test_a_console_shows_control_characters() -> None:
    """Bug: an answer of a model set the terminal's title, or cleared the screen."""
    console = VisibleConsole(file=io.StringIO(), width=200, force_terminal=False)
    table = Table(title=Text(ATTACK))
    table.add_row(Text(ATTACK), escape(ATTACK))
    for text in (ATTACK, Text(ATTACK), table):
        console.print(text, markup=False)
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert not OBEYED & set(printed)
    assert printed.count("␛]52;c;cm0") == 5


def test_colours_and_moves_of_the_console_stay() -> None:
    """Bug: the console's escape sequences are shown as text."""
    console = VisibleConsole(file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(Text("x", "red"))
    console.show_cursor(False)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "\x1b[31mx\x1b[0m\n\x1b[?25l"


def test_errors_notes_warnings_and_work_show_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: escape sequences in a server's error message reached the terminal."""
    error = RolloutError(f"the server says {ATTACK}")
    error.add_note(f"its log:\n\t{ATTACK}")
    with pytest.raises(SystemExit), exit_status(""):
        raise error
    assert logging.lastResort is not None
    record = logging.LogRecord("nemo_opd", logging.WARNING, "", 0, "it says %s", (ATTACK,), None)
    print(logging.lastResort.format(record), file=sys.stderr)
    print_line(ATTACK)
    printed = capsys.readouterr()
    assert not OBEYED & set(printed.out + printed.err)
    assert printed.err.count("␛]52;c;cm0") == 3
    assert "its log:\n\ta" in printed.err


def test_keys_and_paths_of_an_error_stay_whole_in_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: lines break within a path, which then cannot be copied."""
    monkeypatch.setenv("COLUMNS", "30")
    path = "/a/folder-with-a-name/that-is-longer-than-a-line"
    for in_terminal, lines in ((True, ["error: data.train.text_files=", path, "does not exist"]), (False, None)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=in_terminal: is_terminal)
        with pytest.raises(SystemExit), exit_status(""):
            raise RolloutError(f"data.train.text_files= {path} does not exist")
        printed = capsys.readouterr().err.splitlines()
        assert printed == (lines or [f"error: data.train.text_files= {path} does not exist"])


def test_json_has_no_control_characters() -> None:
    """Bug: `generate --json` prints one-byte escape sequences of a model's answer."""
    value = {"response": "\x1b[31m \x9b31m \x7f 東京"}
    line = visible_json(value)
    assert json.loads(line) == value
    assert "東京" in line
    assert line.isprintable()
