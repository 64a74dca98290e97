"""Folders of a `--multirun`: one for all, and in it one for each run, named by the settings that vary."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from nemo_opd.config.secrets import masked_leaf, without_secrets

_LONGEST_NAME = 120
_ODD = re.compile(r"[^\w.=,+-]+")


@dataclass
class Sweep:
    """The runs of one command line, in the order in which they come."""

    keys: tuple[str, ...]
    """Keys that vary."""
    root: Path | None = None
    """Known with the first run."""
    names: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, typed: Sequence[str]) -> "Sweep":
        """Find the keys that vary. typed: the command line's overrides."""
        return cls(tuple(argument.lstrip("+").partition("=")[0] for argument in typed if _is_sweep(argument)))

    def place(self, data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
        """Return the settings of the next run with the folder that it is to write into.

        data: the settings as they were composed. overrides: of this run. `run.output_dir` (or `output_dir`, of a
        command without `run`) is the folder of the sweep where it is given, else `outputs/NAME/sweep_TIME`.
        """
        run: Mapping[str, Any] = data.get("run", data)
        if self.root is None:
            stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
            given, name = run.get("output_dir"), run.get("name", "evaluation")
            self.root = Path(given) if given else Path("outputs") / str(name) / f"sweep_{stamp}"
        placed = {**run, "output_dir": str(self.root / self._next_name(overrides))}
        return {**data, "run": placed} if "run" in data else placed

    def _next_name(self, overrides: Sequence[str]) -> str:
        """Return a name from the values that vary; numbered where it is taken."""
        pairs = (override.lstrip("+").partition("=") for override in overrides)
        varied = ",".join(f"{key}={_shown(key, value)}" for key, _, value in pairs if key in self.keys)
        name = _ODD.sub("_", varied).strip("_") or "run"
        if len(name) > _LONGEST_NAME:
            name = f"{name[: _LONGEST_NAME - 9]}_{hashlib.sha256(varied.encode()).hexdigest()[:8]}"
        if name in self.names:
            name = f"{name}_{len(self.names)}"
        self.names.append(name)
        return name


def _shown(key: str, value: str) -> str:
    """Return the value of an override without secrets."""
    return without_secrets(masked_leaf({}, tuple(key.split(".")), value))


def _is_sweep(argument: str) -> bool:
    """Return whether an override has several values, for a run with each."""
    try:
        return OverridesParser.create().parse_override(argument).is_sweep_override()
    except HydraException:
        return False
