"""`transformers serve`, whose completions also take and return token ids: run as a module, with its options.

A request whose prompt is a list of token ids is answered in vLLM's form: `token_ids`, and in `logprobs` the
log-probability of each after temperature, top-k and top-p, and as `raw_logprobs` at temperature 1 before them. Besides
OpenAI's keys it takes `top_k`, `stop_token_ids` and `vocab_size`, the rows of the head that are tokens. What a `stop`
text has ended is all that was sampled. A prompt that is a text is answered as usual.
"""

from typing import Any

import numpy as np
import typer
from fastapi import HTTPException
from fastapi.responses import JSONResponse
from transformers.cli.serve import Serve
from transformers.cli.serving import completion

from nemo_opd.errors import RolloutError
from nemo_opd.models.generation import generating
from nemo_opd.rollout.base import Completion, Request, Sampling
from nemo_opd.rollout.hf import Sampler


class _TokenCompletions(completion.CompletionHandler):
    """Completions by token ids, one sequence at a time in the model's thread, seeded by request."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answer a request. Raises HTTPException with status 400 for one that does not fit the model."""
        if isinstance(body.get("prompt"), str):
            return await super().handle_request(body, request_id)
        model_id, model, tokenizer = self._resolve_model(body)
        manager: Any = self.generation_state.get_manager(model_id)
        try:
            sampled = await manager.async_submit(_sample, model, tokenizer, body)
        except (RolloutError, KeyError, TypeError, ValueError) as error:
            raise HTTPException(400, detail=f"{type(error).__name__}: {error}") from error
        return JSONResponse(_reply(request_id, model_id.split("@")[0], sampled))


def _sample(model: Any, tokenizer: Any, body: dict[str, Any]) -> Completion:
    """Sample a completion. Raises RolloutError as `Sampler.generate` does, KeyError for a missing key."""
    sampler = Sampler(
        model,
        end_ids=body["stop_token_ids"],
        vocab_size=body["vocab_size"],
        batch_size=1,
        device=str(model.device),
        tokenizer=lambda: tokenizer,
    )
    prompt = np.array(body["prompt"], np.int32)
    request = Request(prompt, body["max_tokens"], body["seed"], stop=tuple(body["stop"]))
    sampling = Sampling(body["temperature"], body["top_p"], body["top_k"])
    with generating(model, None):
        return sampler.generate([request], sampling, version=0)[0]


def _reply(request_id: str, model: str, sampled: Completion) -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": "",
        "token_ids": sampled.ids.tolist(),
        "logprobs": {
            "token_logprobs": sampled.behaviour_logprobs.tolist(),
            "raw_logprobs": sampled.logprobs.tolist(),
        },
        "finish_reason": sampled.finish_reason,
    }
    return {"id": request_id, "object": "text_completion", "model": model, "choices": [choice]}


def main() -> None:
    # `Serve` looks up the handler when it is instantiated.
    completion.CompletionHandler = _TokenCompletions  # type: ignore[misc]
    app = typer.Typer()
    app.command()(Serve)
    app()


if __name__ == "__main__":
    main()
