"""SGLang's server."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from nemo_opd.errors import RolloutError
from nemo_opd.rollout.engine_interface import Completion, EngineSpec, Request, Sampling
from nemo_opd.rollout.server.client import Answer, Http, RequestContext, UnusableError
from nemo_opd.rollout.server.server_process import NAME, Json, Program, short_seed
from nemo_opd.users_code import shown

UNUSED_POSITIONS = 6
"""Positions at the end of SGLang's context that prompts and sampled tokens cannot use."""


class SGLang(Program):
    """SGLang with its native `/generate`, which takes and returns token ids, and weights from a folder.

    Log-probabilities of sampled tokens are computed after temperature, unless the environment says otherwise, and
    always before top-k and top-p. Log-probabilities of prompts are raw, so raw ones are requested with the sampled
    tokens as a prompt. Seeds have an effect only with deterministic inference, which `arguments` switches on.
    """

    command = (sys.executable, "-m", "sglang.launch_server")
    environment: ClassVar = {
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        # The context is longer than the model's, by the unused positions.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    path = "/generate"
    sees_cuts = False
    hint = (
        "an SGLang server must run with --enable-deterministic-inference, and without SGLANG_RETURN_ORIGINAL_LOGPROB=1 "
        "in its environment"
    )

    def arguments(self, model: str, spec: EngineSpec, memory_share: float) -> list[str]:
        options = ["--model-path", model, "--served-model-name", NAME, "--dtype", spec.dtype]
        options += ["--mem-fraction-static", str(memory_share)]
        if spec.max_length is not None:
            options += ["--context-length", str(spec.max_length + UNUSED_POSITIONS)]
        if spec.gpus:
            options += ["--tp-size", str(len(spec.gpus))]
        if spec.has_fp32_logits:
            options.append("--enable-fp32-lm-head")
        return [*options, "--enable-deterministic-inference"]

    def key_arguments(self, key: str, folder: Path) -> list[str]:
        config = folder / "key.yaml"
        config.write_text(json.dumps({"api-key": key}))
        return ["--config", str(config)]

    def body(self, request: Request, sampling: Sampling, context: RequestContext) -> Json:
        return {
            "input_ids": request.prompt_ids.tolist(),
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": request.max_new_tokens,
                "sampling_seed": short_seed(request.seed),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": -1 if sampling.top_k is None else sampling.top_k,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                # ignore_eos would ignore these as well.
                "stop_token_ids": sorted(context.end_ids),
                "stop": list(request.stop),
                "skip_special_tokens": False,
                **context.bias,
            },
        }

    def answer(self, reply: Json) -> Answer:
        info = reply["meta_info"]
        # A list of (log-probability, id, text or None).
        sampled = info.get("output_token_logprobs")
        return Answer(
            ids=None if sampled is None else [entry[1] for entry in sampled],
            logprobs=None if sampled is None else [entry[0] for entry in sampled],
            finish_reason=(info.get("finish_reason") or {}).get("type"),
            model=None,
        )

    def raw_body(self, request: Request, completion: Completion, context: RequestContext) -> Json:
        # Without the last token, since a prompt of `max_length` would be rejected.
        *first, last = completion.ids.tolist()
        return {
            "input_ids": [*request.prompt_ids.tolist(), *first],
            "return_logprob": True,
            "logprob_start_len": 0,
            "token_ids_logprob": [last],
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        }

    def raw_logprobs(self, reply: Json, completion: Completion) -> object:
        info = reply["meta_info"]
        *first, last = completion.ids.tolist()
        # Lists of (log-probability, id, text or None).
        prompt = info["input_token_logprobs"]
        first_entries = prompt[len(prompt) - len(first) :]
        last_entries = info["output_token_ids_logprobs"][0]
        if [*echoed_ids(first_entries, first), *(entry[1] for entry in last_entries)] != [*first, last]:
            raise UnusableError("it has log-probabilities of other tokens than requested")
        return [entry[0] for entry in (*first_entries, *last_entries)]

    def load(self, http: Http, folder: Path, version: int) -> None:
        body = {"model_path": str(folder), "flush_cache": True, "weight_version": str(version)}
        reply = http.post("/update_weights_from_disk", body) or {}
        if not isinstance(reply, dict) or not reply.get("success"):
            reason = reply.get("message") if isinstance(reply, dict) else shown(reply)
            raise RolloutError(f"{http.url} did not take the weights in {folder}: {reason}")


def echoed_ids(entries: Sequence[Sequence[Any]], sent: Sequence[int]) -> list[Any]:
    """Return the ids of a prompt's log-probability entries.

    SGLang reports the last id of the vocabulary as 0, with the right log-probability. At positions of the highest id of
    `sent`, a 0 therefore counts as that id.
    """
    ids = [entry[1] for entry in entries]
    highest = max(sent, default=0)
    pairs = zip(ids, sent, strict=False)
    return [*(expected if expected == highest and id_ == 0 else id_ for id_, expected in pairs), *ids[len(sent) :]]
