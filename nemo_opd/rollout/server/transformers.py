"""`transformers serve`, extended by token ids and log-probabilities."""

import json
import sys
from pathlib import Path

from nemo_opd.errors import RolloutError
from nemo_opd.rollout.base import EngineSpec, Request, Sampling
from nemo_opd.rollout.server.completion import RequestContext
from nemo_opd.rollout.server.http import Http
from nemo_opd.rollout.server.program import HOST, Json, Program
from nemo_opd.users_code import shown

_APP = "nemo_opd.rollout.server.transformers_app"


class Transformers(Program):
    """`transformers serve` with the completions of `transformers_app`: its own take and return only text.

    It samples one sequence after the other, so it is for small models and tests. A model's name is its folder, by which
    an answer reports its model.
    """

    command = (sys.executable, "-m", _APP)
    # Requests wait for each other in the server, and the time of one counts from its start.
    max_concurrency = 4
    hint = f"`transformers serve` by itself gives neither token ids nor log-probabilities; start it as python -m {_APP}"

    def name(self, model: str) -> str:
        return model

    def arguments(self, model: str, spec: EngineSpec, port: int, memory_share: float) -> list[str]:
        return ["--host", HOST, "--port", str(port), "--dtype", spec.dtype, "--model-timeout=-1"]

    def body(self, request: Request, sampling: Sampling, terms: RequestContext) -> Json:
        return {
            "model": terms.model,
            "prompt": request.prompt_ids.tolist(),
            "max_tokens": request.max_new_tokens,
            "seed": request.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": sorted(terms.end_ids),
            "stop": list(request.stop),
            "vocab_size": terms.vocab_size,
        }

    def served(self, http: Http) -> None:
        return None

    def load(self, http: Http, name: str, folder: Path, version: int) -> str:
        http.post("/reset")
        # A stream of events, the last of which reports the outcome.
        outcome = _last_event(str(http.post("/load_model", {"model": str(folder)})))
        if outcome.get("status") != "ready":
            reason = outcome.get("message") or shown(outcome)
            raise RolloutError(f"{http.url} did not take the weights in {folder}: {reason}")
        return str(folder)


def _last_event(stream: str) -> Json:
    """Return the last object of a stream of events; empty where there is none."""
    _, *events = stream.split("data: ")
    try:
        event = json.loads(events[-1]) if events else {}
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}
