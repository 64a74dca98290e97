"""Findings on a machine, as Markdown and JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from nemo_opd.version import UNKNOWN, commit

FILE, _DATA = "gpu_check.md", "gpu_check.json"
_SAME = ("commit", "machine", "packages")
"""Facts that parts of one report share."""
_PACKAGES = ("nemo-opd", "torch", "transformers", "ray", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


class Outcome(Enum):
    PASSED = "passed"
    FAILED = "FAILED"
    NOT_HERE = "skipped"


@dataclass(frozen=True)
class Part:
    """Findings of one part."""

    outcome: Outcome
    summary: str
    """A line; where it failed or cannot run, the reason."""
    facts: dict[str, str] = field(default_factory=dict)
    """Label → value."""
    text: str = ""
    """Further lines, as they were printed."""
    seconds: float = 0.0


@dataclass
class Report:
    facts: dict[str, str]
    parts: dict[str, Part] = field(default_factory=dict)

    @staticmethod
    def begin(command: str, folder: Path) -> Report:
        """Begin with the parts that a check of the same commit, machine and packages has left in the folder."""
        facts = {
            "commit": commit(),
            "date": date.today().isoformat(),
            "command": command,
            "machine": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
            "packages": ", ".join(f"{name} {found}" for name in _PACKAGES if (found := _version(name))),
        }
        return Report(facts, parts_before(folder, facts))

    def markdown(self) -> str:
        lines = ["# GPU check", "", *(f"* {label}: {value}" for label, value in self.facts.items()), ""]
        lines += ["| part | outcome | seconds | what |", "|---|---|---|---|"]
        lines += [
            f"| {name} | {part.outcome.value} | {part.seconds:.0f} | {part.summary} |"
            for name, part in self.parts.items()
        ]
        for name, part in self.parts.items():
            if part.facts or part.text:
                lines += ["", f"## {name}", ""]
                lines += [f"* {label}: {value}" for label, value in part.facts.items()]
                lines += ["", "```text", part.text.strip(), "```"] if part.text else []
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        parts = {name: {**asdict(part), "outcome": part.outcome.value} for name, part in self.parts.items()}
        (folder / FILE).write_text(self.markdown(), encoding="utf-8")
        (folder / _DATA).write_text(
            json.dumps({"facts": self.facts, "parts": parts}, indent=1) + "\n", encoding="utf-8"
        )


def parts_before(folder: Path, facts: Mapping[str, str]) -> dict[str, Part]:
    """Return the parts of a report in the folder that has the same commit, machine and packages; else none.

    Of an unknown commit nobody can say whether it is the same.
    """
    try:
        before = json.loads((folder / _DATA).read_text(encoding="utf-8"))
        if facts["commit"] == UNKNOWN or any(before["facts"][name] != facts[name] for name in _SAME):
            return {}
        return {name: Part(**each | {"outcome": Outcome(each["outcome"])}) for name, each in before["parts"].items()}
    except (OSError, ValueError, KeyError, TypeError):  # nothing is there, or a report of another version
        return {}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
