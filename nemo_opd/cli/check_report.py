"""Results of a check, as Markdown and JSON, and the output in one log."""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nemo_opd.version import UNKNOWN, commit, package_version

FILE, _DATA, _LOG = "gpu_check.md", "gpu_check.json", "gpu_check.log"
PASSED, SKIPPED = "passed", "skipped"
_SAME = ("commit", "machine", "packages")
"""Facts that all parts of a report share."""
_PACKAGES = ("torch", "transformers", "ray", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_TEST = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)(?= tests/|[^\n]*\[ *\d+%\])")
"""A test in pytest's output, even if that ends before its summary; with several workers its name follows."""


@dataclass(frozen=True)
class Result:
    """Results of one part."""

    outcome: str
    """`passed`, `skipped: WHY` or `FAILED: WHY`."""
    seconds: float = 0.0
    tests: str = ""
    """Numbers of tests by outcome, also of a part that was stopped."""
    values: list[Any] = field(default_factory=list)
    """Parsed JSON lines of its output."""


def read_output(outcome: str, seconds: float, output: str) -> Result:
    """Parse a part's output; the part counts as skipped if all its tests were."""
    tests = Counter(_TEST.findall(output))
    values = []
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                values.append(json.loads(line))
            except ValueError:  # the process was killed within the line
                continue
    if outcome == PASSED and set(tests) == {"SKIPPED"}:
        outcome = f"{SKIPPED}: all tests; the log has the reasons"
    return Result(outcome, round(seconds, 1), ", ".join(f"{n} {kind.lower()}" for kind, n in tests.items()), values)


@dataclass
class Report:
    folder: Path
    facts: dict[str, str]
    parts: dict[str, Result] = field(default_factory=dict)

    @staticmethod
    def begin(command: str, folder: Path) -> Report:
        """Begin a report with the parts of an earlier check of the same commit, machine and packages in the folder."""
        installed = {"nemo-opd": package_version()} | {name: _version(name) for name in _PACKAGES}
        facts = {
            "commit": commit(),
            "date": date.today().isoformat(),
            "command": command,
            "machine": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
            "packages": ", ".join(f"{name} {number}" for name, number in installed.items() if number),
        }
        folder.mkdir(parents=True, exist_ok=True)
        parts = parts_before(folder, facts)
        if not parts:
            (folder / _LOG).unlink(missing_ok=True)
        return Report(folder, facts, parts)

    def add(self, name: str, result: Result, output: str = "") -> None:
        """Add a part and write the files at once: the next part may crash the machine."""
        self.parts[name] = result
        with (self.folder / _LOG).open("a", encoding="utf-8") as log:
            log.write(f"\n======== {name}: {result.outcome}, {result.seconds} s\n{output}")
        (self.folder / FILE).write_text(self.markdown(), encoding="utf-8")
        parts = {part_name: asdict(part) for part_name, part in self.parts.items()}
        data = json.dumps({"facts": self.facts, "parts": parts}, indent=1, ensure_ascii=False)
        (self.folder / _DATA).write_text(f"{data}\n", encoding="utf-8")

    def markdown(self) -> str:
        lines = ["# GPU check", "", *(f"* {label}: {value}" for label, value in self.facts.items()), ""]
        lines += ["| part | outcome | seconds | tests |", "|---|---|---|---|"]
        for name, part in self.parts.items():
            lines.append(f"| {name} | {part.outcome} | {part.seconds} | {part.tests} |")
        for name, part in self.parts.items():
            if part.values:
                values = [json.dumps(value, ensure_ascii=False) for value in part.values]
                lines += ["", f"## {name}", "", "```json", *values, "```"]
        return "\n".join(lines) + "\n"


def parts_before(folder: Path, facts: Mapping[str, str]) -> dict[str, Result]:
    """Return the parts of the folder's report if it has the same commit, machine and packages; otherwise empty.

    Two unknown commits may differ.
    """
    try:
        previous = json.loads((folder / _DATA).read_text(encoding="utf-8"))
        if facts["commit"] == UNKNOWN or any(previous["facts"][name] != facts[name] for name in _SAME):
            return {}
        return {name: Result(**part) for name, part in previous["parts"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no report, or one of another version
        return {}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
