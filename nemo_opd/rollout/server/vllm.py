"""vLLM's server."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_opd.errors import RolloutError
from nemo_opd.rollout.base import Completion, Request, Sampling
from nemo_opd.rollout.server.answer import Answer
from nemo_opd.rollout.server.folder import weight_files
from nemo_opd.rollout.server.http import Http
from nemo_opd.rollout.server.program import HOST, Json, Launch, Program, Terms, openai_models, short_seed

NAME = "student"
EXTENSION_FOLDER = Path(__file__).parent / "vllm_extension"
EXTENSION = "nemo_opd_weights.Extension"
TRANSFER = json.dumps({"backend": "nemo_opd"})
FP32_HEAD = json.dumps({"head_dtype": "float32"})
"""Versions that know it for pooling only go on rounding."""


class VLLM(Program):
    """vLLM: token ids on request, log-probabilities as configured at its start, weights by its weight transfer.

    It gives one kind of log-probability, which is that of the policy that samples. Those of a prompt are always raw, so
    the others are asked for with the sampled tokens as a prompt.

    The transfer's engine is ours (`vllm_extension`): of those that vLLM brings, each needs CUDA or vLLM in the trainer.

    Its generators are seeded request by request, so what is batched together does not matter.
    """

    command: tuple[str, ...] = ("vllm", "serve")
    # The calls for new weights are among those it has for development only.
    environment: Mapping[str, str] = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(EXTENSION_FOLDER),
    }
    path = "/v1/completions"
    max_concurrency = None
    sees_cuts = True
    loads_files = True
    hint = (
        f"a vLLM server must run with VLLM_SERVER_DEV_MODE=1 PYTHONPATH={EXTENSION_FOLDER} in its environment and with "
        f"--logprobs-mode processed_logprobs --generation-config vllm --worker-extension-cls {EXTENSION} "
        f"--weight-transfer-config '{TRANSFER}'"
    )

    def name(self, model: str) -> str:
        return NAME

    def arguments(self, launch: Launch) -> list[str]:
        # The model's own generation settings would change how it samples where a request leaves something open.
        options = ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--dtype", launch.dtype]
        options += ["--worker-extension-cls", EXTENSION, "--weight-transfer-config", TRANSFER]
        # Of CPUs' memory too, in spite of its name.
        options += ["--gpu-memory-utilization", str(launch.memory_share)]
        if launch.max_length is not None:
            options += ["--max-model-len", str(launch.max_length)]
        if launch.fp32_logits:
            options += ["--hf-overrides", FP32_HEAD]
        return [launch.model, "--host", HOST, "--port", str(launch.port), "--served-model-name", NAME, *options]

    def body(self, request: Request, sampling: Sampling, terms: Terms) -> Json:
        return {
            "model": terms.model,
            "prompt": request.prompt_ids.tolist(),
            "max_tokens": request.max_new_tokens,
            "seed": short_seed(request.seed),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1 if sampling.top_k is None else sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,
            "return_token_ids": True,
            # Ours decide, and not what the folder's files say.
            "ignore_eos": True,
            "stop_token_ids": list(terms.end_ids),
            **terms.bias,
        }

    def answer(self, reply: Json) -> Answer:
        choice = reply["choices"][0]
        logprobs = choice.get("logprobs") or {}
        return Answer(
            ids=choice.get("token_ids"),
            logprobs=logprobs.get("token_logprobs"),
            finish_reason=choice.get("finish_reason"),
            model=reply.get("model"),
        )

    def raw_body(self, request: Request, completion: Completion, terms: Terms) -> Json | None:
        # The last token as one to be sampled: a prompt of the model's full length would be refused.
        *before, last = completion.ids.tolist()
        return {
            "model": terms.model,
            "prompt": [*request.prompt_ids.tolist(), *before],
            "max_tokens": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "prompt_logprobs": 0,
            "logprobs": 1,
            "logprob_token_ids": [last],
            "return_tokens_as_token_ids": True,
            "ignore_eos": True,
        }

    def raw_logprobs(self, reply: Json, completion: Completion) -> object:
        choice = reply["choices"][0]
        *before, last = completion.ids.tolist()
        # By position, what is known of it by token; nothing of the first.
        known = choice["prompt_logprobs"][len(choice["prompt_logprobs"]) - len(before) :]
        of_prompt = [of_position[str(each)]["logprob"] for each, of_position in zip(before, known, strict=True)]
        return [*of_prompt, choice["logprobs"]["top_logprobs"][0][f"token_id:{last}"]]

    def served(self, http: Http) -> dict[str, str] | None:
        return openai_models(http)

    def load(self, http: Http, name: str, folder: Path, version: int) -> str:
        files = [str(file) for file in weight_files(folder)]
        prepare(http, files)
        transfer(http, files, version)
        return name

    def load_files(self, http: Http, files: Sequence[str], version: int) -> bool:
        try:
            prepare(http, files)
        except RolloutError:
            return False
        transfer(http, files, version)
        return True


def prepare(http: Http, files: Sequence[str]) -> None:
    """Raises RolloutError, with the weights as before, where its workers cannot read the files."""
    http.post("/init_weight_transfer_engine", {"init_info": {"files": files}})


def transfer(http: Http, files: Sequence[str], version: int) -> None:
    # What is left of requests that were given up ends with the pause, and what is cached of the old weights too.
    http.post("/pause")
    http.post("/start_weight_update")
    http.post("/update_weights", {"update_info": {"files": files}})
    http.post("/finish_weight_update", {"weight_version": str(version)})
    http.post("/resume")
