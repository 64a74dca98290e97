#!/usr/bin/env bash
# Makes an environment like that of a GPU machine which has a copy of this checkout: other versions than the lock's, the
# project not installed, of its extras only train. Several GB are downloaded. Then, without a GPU in small:
#
#   tools/gpu_environment.sh FOLDER                                # the versions of gpu_environment.txt, CPython 3.12
#   CONSTRAINTS=/dev/null tools/gpu_environment.sh FOLDER          # the newest that the project allows
#   PYTHONPATH=$PWD FOLDER/bin/python tools/gpu_check.py --within 3600
#
# Triton 3.6 has an interpreter that NumPy 2.5 breaks, so that the part `kernels` needs a GPU with these versions.
# PYTHON names another interpreter, or the version of one that uv finds.
set -euo pipefail

folder=$(realpath -m "${1:?name the folder of the environment}")
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
constraints=$(realpath "${CONSTRAINTS:-$here/gpu_environment.txt}")

cd / # away from the checkout, whose own constraints are those of the lock
uv venv --quiet --python "${PYTHON:-3.12}" "$folder"
VIRTUAL_ENV=$folder uv pip install --requirements "$here/../pyproject.toml" --extra train --constraints "$constraints" \
  pytest pytest-xdist pytest-timeout hypothesis trl liger-kernel
