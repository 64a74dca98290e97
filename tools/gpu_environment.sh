#!/usr/bin/env bash
# Makes an environment like that of a GPU machine which has a copy of this checkout: other versions than the lock's, the
# project not installed, of its extras only train. Several GB are downloaded. Then, without a GPU in small:
#
#   tools/gpu_environment.sh FOLDER                                # the versions of gpu_environment.txt, CPython 3.12
#   CONSTRAINTS=/dev/null tools/gpu_environment.sh FOLDER          # the newest that the project allows
#   PYTHONPATH=$PWD FOLDER/bin/python tools/gpu_check.py --within 3600
#
# PYTHON names another interpreter, or the version of one that uv finds.
set -euo pipefail

folder=$(realpath -m "${1:?name the folder of the environment}")
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
constraints=$(realpath "${CONSTRAINTS:-$here/gpu_environment.txt}")

cd / # away from the checkout, whose own constraints are those of the lock
uv venv --quiet --python "${PYTHON:-3.12}" "$folder"
VIRTUAL_ENV=$folder uv pip install --requirements "$here/../pyproject.toml" --extra train --constraints "$constraints" \
  pytest pytest-xdist pytest-timeout hypothesis trl liger-kernel
# Triton 3.6's interpreter, which no GPU uses, calls int() for arrays of one number; NumPy 2.5 refuses that.
sed -i 's/int(self\.handle\.data)/int(self.handle.data.item())/' \
  "$folder"/lib/python3*/site-packages/triton/runtime/interpreter.py
