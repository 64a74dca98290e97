"""vLLM's server."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from nemo_opd.errors import RolloutError
from nemo_opd.models.folder import safetensors_files
from nemo_opd.rollout.engine_interface import Completion, EngineSpec, Request, Sampling
from nemo_opd.rollout.server.client import Answer, Http, RequestContext
from nemo_opd.rollout.server.server_process import NAME, Json, Program, short_seed

_EXTENSION_FOLDER = Path(__file__).parent / "vllm_extension"
_EXTENSION = "nemo_opd_weights.Extension"
_TRANSFER = json.dumps({"backend": "nemo_opd"})
_FP32_HEAD = json.dumps({"head_dtype": "float32"})
"""vLLM versions that read this only for pooling models still round."""


class VLLM(Program):
    """vLLM with its weight transfer.

    Log-probabilities of sampled tokens are the sampling policy's, as configured at its start. Log-probabilities of
    prompts are always raw, so raw ones are requested with the sampled tokens as a prompt. Random generators are seeded
    per request, so batching does not matter.

    The transfer engine is ours (`vllm_extension`): vLLM's own engines need CUDA, or vLLM in the trainer.
    """

    command = ("vllm", "serve")
    # The calls for weight updates and sleep exist only in development mode.
    environment: ClassVar = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(_EXTENSION_FOLDER),
    }
    path = "/v1/completions"
    loads_files = True
    socket_option = "--uds"
    hint = (
        f"a vLLM server must run with VLLM_SERVER_DEV_MODE=1 PYTHONPATH={_EXTENSION_FOLDER} in its environment and "
        f"with --logprobs-mode processed_logprobs --generation-config vllm --worker-extension-cls {_EXTENSION} "
        f"--weight-transfer-config '{_TRANSFER}'"
    )

    def arguments(self, model: str, spec: EngineSpec, memory_share: float) -> list[str]:
        # --generation-config vllm: the model's generation config must not fill in a request's unset options.
        options = ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--dtype", spec.dtype]
        options += ["--worker-extension-cls", _EXTENSION, "--weight-transfer-config", _TRANSFER]
        # In spite of its name, this is also the share of a CPU's memory.
        options += ["--gpu-memory-utilization", str(memory_share)]
        if spec.max_length is not None:
            options += ["--max-model-len", str(spec.max_length)]
        if spec.sleeps:
            options.append("--enable-sleep-mode")
        if spec.gpus:
            options += ["--tensor-parallel-size", str(len(spec.gpus))]
        if spec.has_fp32_logits:
            options += ["--hf-overrides", _FP32_HEAD]
        return [model, "--served-model-name", NAME, *options]

    def body(self, request: Request, sampling: Sampling, context: RequestContext) -> Json:
        return {
            "model": context.model,
            "prompt": request.prompt_ids.tolist(),
            "max_tokens": request.max_new_tokens,
            "seed": short_seed(request.seed),
            **sampled_with(sampling),
            "logprobs": 0,
            "return_token_ids": True,
            # Only the request's end tokens count, not the model folder's.
            "ignore_eos": True,
            "stop_token_ids": sorted(context.end_ids),
            "stop": list(request.stop),
            **context.bias,
        }

    def answer(self, reply: Json) -> Answer:
        choice = reply["choices"][0]
        return Answer(
            ids=choice.get("token_ids"),
            logprobs=(choice.get("logprobs") or {}).get("token_logprobs"),
            finish_reason=choice.get("finish_reason"),
            model=reply.get("model"),
        )

    def raw_body(self, request: Request, completion: Completion, context: RequestContext) -> Json:
        # Without the last token, since a prompt of the model's full length would be rejected.
        *first, last = completion.ids.tolist()
        return {
            "model": context.model,
            "prompt": [*request.prompt_ids.tolist(), *first],
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
        *first, last = completion.ids.tolist()
        # For each position but the first: token → log-probability.
        entries = choice["prompt_logprobs"][len(choice["prompt_logprobs"]) - len(first) :]
        first_logprobs = [entry[str(token)]["logprob"] for token, entry in zip(first, entries, strict=True)]
        return [*first_logprobs, choice["logprobs"]["top_logprobs"][0][f"token_id:{last}"]]

    def load(self, http: Http, folder: Path, version: int) -> None:
        files = [str(file) for file in safetensors_files(folder)]
        _prepare(http, files)
        _transfer(http, files, version)

    def load_files(self, http: Http, files: Sequence[str], version: int) -> bool:
        try:
            _prepare(http, files)
        except RolloutError:
            return False
        _transfer(http, files, version)
        return True

    def sleep(self, http: Http) -> None:
        # Level 2 would drop the weights, which are needed if the next samples come from the same version.
        http.post("/sleep?level=1")

    def wake(self, http: Http) -> None:
        http.post("/wake_up")


def sampled_with(sampling: Sampling) -> Json:
    """Return a request's sampling options, independent of the server's defaults."""
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
    """Let the workers open the files. Raises RolloutError if they cannot; the old weights stay."""
    http.post("/init_weight_transfer_engine", {"init_info": {"files": files}})


def _transfer(http: Http, files: Sequence[str], version: int) -> None:
    """Replace the weights. The pause ends abandoned requests and drops all caches of the old weights."""
    http.post("/pause")
    http.post("/start_weight_update")
    http.post("/update_weights", {"update_info": {"files": files}})
    http.post("/finish_weight_update", {"weight_version": str(version)})
    http.post("/resume")
