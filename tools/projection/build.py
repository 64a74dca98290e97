#!/usr/bin/env python
"""`nemo-opd projection build` from a checkout of the project."""

import sys

# A script's folder comes first on its path, and inspect.py would hide the standard library's.
if sys.path[0] == __file__.rpartition("/")[0]:
    sys.path[0] = __file__.rpartition("/tools/")[0]

from nemo_opd.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["projection", "build", *sys.argv[1:]]))
