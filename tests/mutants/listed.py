"""The mistakes of mutants.toml."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """A change of a file from `old` to `new` which at least one of the tests must catch."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, tree: Path) -> None:
        """Change the file in a copy of the repository. Raises ValueError unless it has the passage exactly once."""
        path = tree / self.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.file} has the passage {count} times; correct mutants.toml")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def listed() -> list[Mutant]:
    table = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8"))
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in table["mutant"]]
