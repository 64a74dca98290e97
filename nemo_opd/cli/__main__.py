"""`python -m nemo_opd.cli`, for launchers that start modules, such as torchrun."""

import sys

from nemo_opd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
