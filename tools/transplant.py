#!/usr/bin/env python
"""`nemo-opd transplant` from a checkout of the project."""

import sys

from nemo_opd.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["transplant", *sys.argv[1:]]))
