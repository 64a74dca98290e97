#!/usr/bin/env bash
# Makes a virtual environment with SGLang's server for CPUs, without its packages for CUDA, for tests alone.
#
#   tests/rollout/sglang_on_cpu/install.sh FOLDER
#   NEMO_OPD_SGLANG=FOLDER uv run pytest tests/rollout/test_server_sglang.py
set -euo pipefail
folder=$1
torch=2.13.0
if [[ -z ${UV_FIND_LINKS:-} ]] && links=$(python3 -m pip config get global.find-links 2>/dev/null); then
  export UV_FIND_LINKS=$links
fi
backend=()
[[ -n ${UV_FIND_LINKS:-} ]] || backend=(--torch-backend cpu)
install=(uv pip install --quiet --no-config --python "$folder/bin/python")

uv venv --quiet --clear --python 3.11 "$folder"
"${install[@]}" --no-deps sglang==0.5.23
"${install[@]}" "${backend[@]}" torch==$torch transformers==5.19.0 \
  aiohttp anthropic apache-tvm-ffi==0.1.11 blobfile==3.0.0 compressed-tensors==0.18.0 datasets dill distro easydict \
  einops fastapi gguf httpx interegular ipython jsonschema llguidance msgspec numba==0.65.1 nvidia-ml-py openai==2.8.0 \
  openai-harmony==0.0.4 orjson partial_json_parser pillow prometheus-client psutil py-spy pybase64 python-multipart \
  pyzmq requests scipy sentencepiece==0.2.1 setproctitle soundfile==0.13.1 tiktoken triton uvicorn uvloop watchfiles \
  xgrammar==0.2.7 xxhash zstandard
