"""Folders of a `--multirun`: one for the sweep, with a subfolder for each run, named by the settings that vary."""

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
    """The runs of one command line, in order."""

    keys: tuple[str, ...]
    """Keys that vary."""
    root: Path | None = None
    """Folder of the sweep; set when the first run is placed."""
    names: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, typed: Sequence[str]) -> "Sweep":
        """Find the keys that vary.

        typed: the command line's overrides.
        """
        return cls(tuple(argument.lstrip("+").partition("=")[0] for argument in typed if _is_sweep(argument)))

    def place(self, data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
        """Return the next run's settings, with the folder that it writes to.

        data: the composed settings. overrides: this run's overrides. The sweep's folder is `run.output_dir` (or
        `output_dir`, for a command without `run`) if set, otherwise `outputs/NAME/sweep_TIME`.
        """
        run: Mapping[str, Any] = data.get("run", data)
        if self.root is None:
            stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
            folder, name = run.get("output_dir"), run.get("name", "evaluation")
            self.root = Path(folder) if folder else Path("outputs") / str(name) / f"sweep_{stamp}"
        placed = {**run, "output_dir": str(self.root / self._next_name(overrides))}
        return {**data, "run": placed} if "run" in data else placed

    def _next_name(self, overrides: Sequence[str]) -> str:
        """Return a name made of the values that vary, with a number if it is taken."""
        pairs = (override.lstrip("+").partition("=") for override in overrides)
        varied = ",".join(f"{key}={_masked(key, value)}" for key, _, value in pairs if key in self.keys)
        name = _ODD.sub("_", varied).strip("_") or "run"
        if len(name) > _LONGEST_NAME:
            name = f"{name[: _LONGEST_NAME - 9]}_{hashlib.sha256(varied.encode()).hexdigest()[:8]}"
        if name in self.names:
            name = f"{name}_{len(self.names)}"
        self.names.append(name)
        return name


def _masked(key: str, value: str) -> str:
    """Return an override's value without secrets."""
    return without_secrets(masked_leaf({}, tuple(key.split(".")), value))


def _is_sweep(argument: str) -> bool:
    """Return whether an override has several values, one for each run."""
    try:
        return OverridesParser.create().parse_override(argument).is_sweep_override()
    except HydraException:
        return False
