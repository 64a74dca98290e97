#!/usr/bin/env python
"""`nemo-opd check` from a checkout of the project."""

import sys

from nemo_opd.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["check", *sys.argv[1:]]))
