"""vLLM's server."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from nemo_opd.errors import RolloutError
from nemo_opd.rollout.base import Completion, EngineSpec, Request, Sampling
from nemo_opd.rollout.server.completion import Terms
from nemo_opd.rollout.server.folder import weight_files
from nemo_opd.rollout.server.http import Http
from nemo_opd.rollout.server.program import HOST, NAME, Json, Program, short_seed

_EXTENSION_FOLDER = Path(__file__).parent / "vllm_extension"
_EXTENSION = "nemo_opd_weights.Extension"
_TRANSFER = json.dumps({"backend": "nemo_opd"})
_FP32_HEAD = json.dumps({"head_dtype": "float32"})
"""Versions that read it only for pooling still round."""


class VLLM(Program):
    """vLLM: token ids on request, log-probabilities as configured at its start, weights by its weight transfer.

    It returns one kind of log-probability, that of the policy that samples. Those of a prompt are always raw, so raw
    ones are requested with the sampled tokens as a prompt. Generators are seeded by request, so batches do not matter.

    The transfer's engine is ours (`vllm_extension`): each of vLLM's own needs CUDA, or vLLM in the trainer.
    """

    command = ("vllm", "serve")
    # Calls for new weights and for sleep exist in development mode only.
    environment: ClassVar = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(_EXTENSION_FOLDER),
    }
    loads_files = True
    hint = (
        f"a vLLM server must run with VLLM_SERVER_DEV_MODE=1 PYTHONPATH={_EXTENSION_FOLDER} in its environment and "
        f"with --logprobs-mode processed_logprobs --generation-config vllm --worker-extension-cls {_EXTENSION} "
        f"--weight-transfer-config '{_TRANSFER}'"
    )

    def arguments(self, model: str, spec: EngineSpec, port: int, memory_share: float) -> list[str]:
        # Else the model's own generation settings would fill what a request leaves open.
        options = ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--dtype", spec.dtype]
        options += ["--worker-extension-cls", _EXTENSION, "--weight-transfer-config", _TRANSFER]
        # It is the share of CPUs' memory too, in spite of its name.
        options += ["--gpu-memory-utilization", str(memory_share)]
        if spec.max_length is not None:
            options += ["--max-model-len", str(spec.max_length)]
        if spec.sleeps:
            options.append("--enable-sleep-mode")
        if spec.gpus:
            options += ["--tensor-parallel-size", str(len(spec.gpus))]
        if spec.has_fp32_logits:
            options += ["--hf-overrides", _FP32_HEAD]
        return [model, "--host", HOST, "--port", str(port), "--served-model-name", NAME, *options]

    def body(self, request: Request, sampling: Sampling, terms: Terms) -> Json:
        return {
            "model": terms.model,
            "prompt": request.prompt_ids.tolist(),
            "max_tokens": request.max_new_tokens,
            "seed": short_seed(request.seed),
            **sampled_with(sampling),
            "logprobs": 0,
            "return_token_ids": True,
            # The request's ends count, and not those of the folder's files.
            "ignore_eos": True,
            "stop_token_ids": sorted(terms.end_ids),
            "stop": list(request.stop),
            **terms.bias,
        }

    def raw_body(self, request: Request, completion: Completion, terms: Terms) -> Json:
        # The last token is sampled and not in the prompt: a prompt of the model's full length would be refused.
        *before, last = completion.ids.tolist()
        return {
            "model": terms.model,
            "prompt": [*request.prompt_ids.tolist(), *before],
            "max_tokens": 1,
            **sampled_with(Sampling()),
            "prompt_logprobs": 0,
            "logprobs": 1,
            "logprob_token_ids": [last],
            "return_tokens_as_token_ids": True,
            "ignore_eos": True,
        }

    def raw_logprobs(self, reply: Json, completion: Completion) -> object:
        choice = reply["choices"][0]
        *before, last = completion.ids.tolist()
        # For each position but the first: token → log-probability.
        known = choice["prompt_logprobs"][len(choice["prompt_logprobs"]) - len(before) :]
        of_prompt = [of_position[str(each)]["logprob"] for each, of_position in zip(before, known, strict=True)]
        return [*of_prompt, choice["logprobs"]["top_logprobs"][0][f"token_id:{last}"]]

    def load(self, http: Http, name: str, folder: Path, version: int) -> str:
        files = [str(file) for file in weight_files(folder)]
        _prepare(http, files)
        _transfer(http, files, version)
        return name

    def load_files(self, http: Http, files: Sequence[str], version: int) -> bool:
        try:
            _prepare(http, files)
        except RolloutError:
            return False
        _transfer(http, files, version)
        return True

    def sleep(self, http: Http) -> None:
        # Level 2 would leave no weights, which are needed where the next samples come from the same ones.
        http.post("/sleep?level=1")

    def wake(self, http: Http) -> None:
        http.post("/wake_up")


def sampled_with(sampling: Sampling) -> Json:
    """Return the keys of a request that samples so, whatever the server's defaults are."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def _prepare(http: Http, files: Sequence[str]) -> None:
    """Raise RolloutError, with the weights as before, where its workers cannot read the files."""
    http.post("/init_weight_transfer_engine", {"init_info": {"files": files}})


def _transfer(http: Http, files: Sequence[str], version: int) -> None:
    """Replace the weights. The pause ends abandoned requests, and drops all caches of the old weights."""
    http.post("/pause")
    http.post("/start_weight_update")
    http.post("/update_weights", {"update_info": {"files": files}})
    http.post("/finish_weight_update", {"weight_version": str(version)})
    http.post("/resume")
