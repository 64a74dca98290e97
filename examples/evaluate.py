"""Evaluation from a checkout of the project: `nemo-opd evaluate`."""

import sys

from nemo_opd.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
