"""On-policy distillation from a checkout of the project: `nemo-opd distil-on-policy`."""

import sys

from nemo_opd.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["distil-on-policy", *sys.argv[1:]]))
