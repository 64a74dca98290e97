"""What pages of the documentation show: blocks of code, and commands in them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ([\w/]+\.(?:py|yaml))\n")


@dataclass(frozen=True)
class Block:
    """A block of code; one that begins with a comment of a file's name is that file."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        found = _FILE.match(self.text)
        return found[1] if found else None

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command of a shell, without comments."""
        lines = re.sub(r"\\\n", "", self.text).splitlines()
        return [words for line in lines if (words := shlex.split(line.removeprefix("$ "), comments=True))]


def blocks(page: Path, *languages: str) -> list[Block]:
    """All blocks of a page in these languages, in order."""
    found = (
        Block(match[2], re.sub(f"^{match[1]}", "", match[3], flags=re.MULTILINE))
        for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))
    )
    return [block for block in found if block.language in languages]
