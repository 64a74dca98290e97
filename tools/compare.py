#!/usr/bin/env python
"""`nemo-opd compare` from a checkout of the project."""

import sys

from nemo_opd.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
