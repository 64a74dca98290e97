#!/usr/bin/env python
"""`nemo-opd check` from a checkout of the project, by default into a folder of the day: benchmarks/results/gpu/DATE."""

import sys
from datetime import date
from pathlib import Path

from nemo_opd.cli.main import main

if __name__ == "__main__":
    folder = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "gpu" / date.today().isoformat()
    sys.exit(main(["check", "--output", str(folder), *sys.argv[1:]]))
