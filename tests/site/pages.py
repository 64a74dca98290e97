"""Code blocks of the documentation's pages, and their commands."""

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
    """A code block; a block that begins with `# NAME.py` or `# NAME.yaml` is that file."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        match = _FILE.match(self.text)
        return match[1] if match else None

    @property
    def commands(self) -> list[list[str]]:
        """Return the words of each shell command, without comments."""
        lines = re.sub(r"\\\n", "", self.text).splitlines()
        return [words for line in lines if (words := shlex.split(line.removeprefix("$ "), comments=True))]


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return a page's blocks in the given languages, in order."""
    matching = (
        Block(match[2], re.sub(f"^{match[1]}", "", match[3], flags=re.MULTILINE))
        for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))
    )
    return [block for block in matching if block.language in languages]
