# /// script
# requires-python = ">=3.11"
# dependencies = ["pyte>=0.8.2", "rich>=13.7"]
# ///
"""Records the README's first command in a terminal, and draws what the terminal shows at its end.

uv run docs/figures/session.py                    # some minutes; writes docs/images/session.svg
uv run docs/figures/session.py --replay FILE      # draws an earlier recording, which --keep FILE has stored
"""

import argparse
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ["uv", "run", "examples/run_off_policy_distillation.py"]
COLUMNS, LINES = 100, 500
"""Size of the terminal: nothing that is printed leaves its upper edge."""
COLORS = {"default": None, "brown": "yellow", "brightbrown": "bright_yellow"}
"""Names of pyte that Rich does not have; others are Rich's, or hexadecimal."""


class Screen(pyte.Screen):
    """A terminal's screen that also knows faint text, which pyte leaves out; it is kept as the attribute blink."""

    def select_graphic_rendition(self, *attributes: int, private: bool = False) -> None:
        super().select_graphic_rendition(*attributes)
        if 2 in attributes and not {38, 48} & set(attributes):
            self.cursor.attrs = self.cursor.attrs._replace(blink=True)


def record() -> bytes:
    """Run the command in a pseudo-terminal, shown here as well, and return what it wrote.

    Raises CalledProcessError where it fails.
    """
    driver, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "COLORTERM", "NO_COLOR", "VIRTUAL_ENV"):
        environment.pop(name, None)
    process = subprocess.Popen(
        COMMAND, cwd=ROOT, env=environment, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    )
    os.close(terminal)
    written = bytearray()
    while part := _read(driver):
        written += part
        sys.stdout.buffer.write(part)
        sys.stdout.flush()
    if status := process.wait():
        raise subprocess.CalledProcessError(status, COMMAND)
    return bytes(written)


def _read(terminal: int) -> bytes:
    """Return what comes next, nothing where the other side is closed: Linux then reports EIO."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def shown(written: bytes) -> Text:
    """Return what a terminal shows in the end."""
    screen = Screen(COLUMNS, LINES)
    pyte.ByteStream(screen).feed(written)
    lines = [Text() for _ in range(LINES)]
    for y, line in enumerate(lines):
        cells = (screen.buffer[y][x] for x in range(COLUMNS))
        for (color, bold, faint), part in groupby(cells, attrgetter("fg", "bold", "blink")):
            line.append("".join(cell.data for cell in part), Style(color=_color(color), bold=bold, dim=faint))
        line.rstrip()
    while not lines[-1]:
        lines.pop()
    return Text("\n").join(lines)


def _color(name: str) -> str | None:
    if name in COLORS:
        return COLORS[name]
    if len(name) == 6 and not set(name) - set("0123456789abcdef"):
        return f"#{name}"
    return name.replace("bright", "bright_")


def draw(text: Text) -> str:
    """Return the SVG of a terminal's window, in the reader's own font: GitHub loads none from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "green"), (" ".join(COMMAND), "bold"), "\n", text))
    svg = console.export_svg(title="nemo_opd", theme=SVG_EXPORT_THEME, unique_id="session")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "session.svg")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="store what the command wrote")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="draw this, and run nothing")
    options = parser.parse_args()
    written = options.replay.read_bytes() if options.replay else record()
    if options.keep:
        options.keep.write_bytes(written)
    options.output.write_text(draw(shown(written)), encoding="utf-8")


if __name__ == "__main__":
    main()
