"""A program that queries the GPUs, in a separate process: `python -m nemo_opd.cli.check.probe`."""

from __future__ import annotations

import json

import torch


def devices() -> dict[str, object]:
    """Return the GPUs, and which of them reach each other's memory."""
    number = torch.cuda.device_count()
    found = [torch.cuda.get_device_properties(i) for i in range(number)]
    peers = [[i != j and torch.cuda.can_device_access_peer(i, j) for j in range(number)] for i in range(number)]
    return {
        "devices": [
            {"name": each.name, "gib": each.total_memory / 2**30, "capability": f"{each.major}.{each.minor}"}
            for each in found
        ],
        "cuda": torch.version.cuda,
        "peers": peers,
    }


if __name__ == "__main__":
    print(json.dumps(devices()))
