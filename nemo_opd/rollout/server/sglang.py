"""SGLang's server."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from nemo_opd.errors import RolloutError
from nemo_opd.rollout.base import Completion, EngineSpec, Request, Sampling
from nemo_opd.rollout.server.completion import Answer, Terms
from nemo_opd.rollout.server.http import Http, UnusableError
from nemo_opd.rollout.server.program import HOST, NAME, Json, Program, short_seed
from nemo_opd.users_code import shown

UNUSED_POSITIONS = 6
"""Last positions of its context, which neither a prompt nor the token after it may take."""


class SGLang(Program):
    """SGLang by its native `/generate`, which takes and returns token ids; weights from a folder.

    Its log-probabilities are those after the temperature, unless the environment says otherwise, and before top-k and
    top-p in any case. Those of a prompt are raw, so raw ones are requested with the sampled tokens as a prompt. Seeds
    count only with deterministic inference, which is switched on at its start.
    """

    command = (sys.executable, "-m", "sglang.launch_server")
    environment: ClassVar = {
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        # Its context is longer than the model's, by positions that no request uses.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    path = "/generate"
    sees_cuts = False
    hint = (
        "an SGLang server must run with --enable-deterministic-inference, and without SGLANG_RETURN_ORIGINAL_LOGPROB=1 "
        "in its environment"
    )

    def arguments(self, model: str, spec: EngineSpec, port: int, memory_share: float) -> list[str]:
        options = ["--model-path", model, "--served-model-name", NAME, "--dtype", spec.dtype]
        options += ["--mem-fraction-static", str(memory_share)]
        if spec.max_length is not None:
            options += ["--context-length", str(spec.max_length + UNUSED_POSITIONS)]
        if spec.gpus:
            options += ["--tp-size", str(len(spec.gpus))]
        if spec.has_fp32_logits:
            options.append("--enable-fp32-lm-head")
        return [*options, "--host", HOST, "--port", str(port), "--enable-deterministic-inference"]

    def body(self, request: Request, sampling: Sampling, terms: Terms) -> Json:
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
                # With ignore_eos it would go on after these as well.
                "stop_token_ids": sorted(terms.end_ids),
                "stop": list(request.stop),
                "skip_special_tokens": False,
                **terms.bias,
            },
        }

    def answer(self, reply: Json) -> Answer:
        info = reply["meta_info"]
        # A list of (log-probability, id, text or None).
        sampled = info.get("output_token_logprobs")
        return Answer(
            ids=None if sampled is None else [each[1] for each in sampled],
            logprobs=None if sampled is None else [each[0] for each in sampled],
            finish_reason=(info.get("finish_reason") or {}).get("type"),
            model=None,
        )

    def raw_body(self, request: Request, completion: Completion, terms: Terms) -> Json:
        # The last token is sampled and not in the prompt: a prompt of `max_length` would be refused.
        *before, last = completion.ids.tolist()
        return {
            "input_ids": [*request.prompt_ids.tolist(), *before],
            "return_logprob": True,
            "logprob_start_len": 0,
            "token_ids_logprob": [last],
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        }

    def raw_logprobs(self, reply: Json, completion: Completion) -> object:
        info = reply["meta_info"]
        *before, last = completion.ids.tolist()
        # Lists of (log-probability, id, text or None).
        known = info["input_token_logprobs"]
        known = known[len(known) - len(before) :]
        of_last = info["output_token_ids_logprobs"][0]
        if [*echoed_ids(known, before), *(each[1] for each in of_last)] != [*before, last]:
            raise UnusableError("it has log-probabilities of other tokens than were asked about")
        return [each[0] for each in (*known, *of_last)]

    def load(self, http: Http, name: str, folder: Path, version: int) -> str:
        body = {"model_path": str(folder), "flush_cache": True, "weight_version": str(version)}
        reply = http.post("/update_weights_from_disk", body) or {}
        if not isinstance(reply, dict) or not reply.get("success"):
            reason = reply.get("message") if isinstance(reply, dict) else shown(reply)
            raise RolloutError(f"{http.url} did not take the weights in {folder}: {reason}")
        return name


def echoed_ids(entries: Sequence[Sequence[Any]], sent: Sequence[int]) -> list[Any]:
    """Return the ids that a prompt's log-probabilities are about.

    SGLang calls the last id of a vocabulary 0, next to its own log-probability: a 0 counts as the highest id of `sent`
    in that id's places.
    """
    found = [each[1] for each in entries]
    highest = max(sent, default=0)
    named = zip(found, sent, strict=False)
    return [*(at if at == highest and each == 0 else each for each, at in named), *found[len(sent) :]]
