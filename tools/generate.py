#!/usr/bin/env python
"""`nemo-opd generate` from a checkout of the project."""

import sys

from nemo_opd.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
