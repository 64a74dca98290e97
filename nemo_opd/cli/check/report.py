"""Results of a check, as Markdown and JSON, and all output in one log."""

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
"""Facts that parts of one report share."""
_PACKAGES = ("torch", "transformers", "ray", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_TEST = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)(?= tests/|[^\n]*\[ *\d+%\])")
"""A test in pytest's output, also if that ends before its summary; with several workers its name follows."""


@dataclass(frozen=True)
class Result:
    """Results of one part."""

    outcome: str
    """`passed`, `skipped: WHY` or `FAILED: WHY`."""
    seconds: float = 0.0
    tests: str = ""
    """Numbers of tests by outcome, also of a part that was ended."""
    values: list[Any] = field(default_factory=list)
    """Lines of JSON that it printed."""


def read_output(outcome: str, seconds: float, output: str) -> Result:
    """Read what a part has printed; if all tests are skipped, nothing has been tested."""
    tests = Counter(_TEST.findall(output))
    values = []
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                values.append(json.loads(line))
            except ValueError:  # the process was ended amid the line
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
        """Begin with the parts that a check of the same commit, machine and packages has left in the folder."""
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
        """Add a part and write everything: the next one may take the machine down."""
        self.parts[name] = result
        with (self.folder / _LOG).open("a", encoding="utf-8") as log:
            log.write(f"\n======== {name}: {result.outcome}, {result.seconds} s\n{output}")
        (self.folder / FILE).write_text(self.markdown(), encoding="utf-8")
        parts = {each: asdict(part) for each, part in self.parts.items()}
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
    """Return the parts of a report in the folder if it has the same commit, machine and packages, or nothing.

    Two unknown commits may differ.
    """
    try:
        before = json.loads((folder / _DATA).read_text(encoding="utf-8"))
        if facts["commit"] == UNKNOWN or any(before["facts"][name] != facts[name] for name in _SAME):
            return {}
        return {name: Result(**part) for name, part in before["parts"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # nothing, or a report of another version
        return {}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
