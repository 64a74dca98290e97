"""What a run really runs on, which its settings (`cluster.device=auto`) do not say: hardware.json in its directory."""

import json
from pathlib import Path

from nemo_opd.files import write_atomically
from nemo_opd.logging.base import RunSummary

NAME = "hardware.json"


def write_hardware(run: RunSummary) -> None:
    """Write the device and how the models are spread over it; a run that continues elsewhere writes anew."""
    found = {"device": run.device, "layout": run.layout}
    write_atomically(run.output_dir / NAME, (json.dumps(found, indent=1) + "\n").encode())


def read_hardware(output_dir: Path) -> dict[str, str]:
    """Return label and value; nothing where the file is not there or damaged."""
    try:
        found = json.loads((output_dir / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(label): str(value) for label, value in found.items()} if isinstance(found, dict) else {}
