"""`transformers serve`, extended by token ids and log-probabilities."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from nemo_opd.errors import RolloutError
from nemo_opd.rollout.base import Completion, Request, Sampling
from nemo_opd.rollout.server.answer import Answer
from nemo_opd.rollout.server.http import Http
from nemo_opd.rollout.server.program import HOST, Json, Launch, Program, Terms
from nemo_opd.users_code import shown

APP = "nemo_opd.rollout.server.transformers_app"


class Transformers(Program):
    """`transformers serve` with the completions of `transformers_app`: its own take text and give text only.

    It samples one sequence after the other, so it is for small models and tests. A model's name is its folder, which
    is how an answer says what made it.
    """

    command: tuple[str, ...] = (sys.executable, "-m", APP)
    environment: Mapping[str, str] = {}
    path = "/v1/completions"
    # They wait for each other in there, and the time of a request counts from its start.
    max_concurrency = 4
    sees_cuts = True
    hint = f"`transformers serve` by itself gives neither token ids nor log-probabilities; start it as python -m {APP}"

    def name(self, model: str) -> str:
        return model

    def arguments(self, launch: Launch) -> list[str]:
        return ["--host", HOST, "--port", str(launch.port), "--dtype", launch.dtype, "--model-timeout=-1"]

    def body(self, request: Request, sampling: Sampling, terms: Terms) -> Json:
        return {
            "model": terms.model,
            "prompt": request.prompt_ids.tolist(),
            "max_tokens": request.max_new_tokens,
            "seed": request.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": list(terms.end_ids),
            "vocab_size": terms.vocab_size,
        }

    def answer(self, reply: Json) -> Answer:
        choice = reply["choices"][0]
        logprobs = choice.get("logprobs") or {}
        return Answer(
            ids=choice.get("token_ids"),
            logprobs=logprobs.get("token_logprobs"),
            finish_reason=choice.get("finish_reason"),
            model=reply.get("model"),
            raw_logprobs=logprobs.get("raw_logprobs"),
        )

    def raw_body(self, request: Request, completion: Completion, terms: Terms) -> Json | None:
        return None

    def raw_logprobs(self, reply: Json, completion: Completion) -> object:
        return self.answer(reply).raw_logprobs

    def served(self, http: Http) -> dict[str, str] | None:
        return None

    def load(self, http: Http, name: str, folder: Path, version: int) -> str:
        http.post("/reset")
        # A stream of events, the last of which says how it went.
        said = last_event(str(http.post("/load_model", {"model": str(folder)})))
        if said.get("status") != "ready":
            reason = said.get("message") or shown(said)
            raise RolloutError(f"{http.url} did not take the weights in {folder}: {reason}")
        return str(folder)


def last_event(stream: str) -> Json:
    """Of a stream of events, each an object; empty where it is none."""
    _, *events = stream.split("data: ")
    try:
        said = json.loads(events[-1]) if events else {}
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
