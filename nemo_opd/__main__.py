"""`python -m nemo_opd`, the command as a module."""

import sys

from nemo_opd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
