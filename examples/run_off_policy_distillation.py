"""Off-policy distillation from a checkout of the project: `nemo-opd distil`."""

import sys

from nemo_opd.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["distil", *sys.argv[1:]]))
