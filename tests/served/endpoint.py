"""Fake servers that answer with a model's exact log-probabilities, in the form of each program."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_opd.models.adapter_folder import resolve
from nemo_opd.models.load import load_tokenizer
from tests.rollout.fake_server import Handler, Json, Responder, fake_server

Scores = Callable[[list[int]], Tensor]
"""Function from ids [N] to log-probabilities [N, W] of the token after each id."""
MODEL = "big"
LIMIT = 4096
_LOCK = threading.Lock()


@cache
def scores_of(model: str) -> Scores:
    """Return the model's fp32 log-probabilities, without head rows that are not tokens."""
    loaded = AutoModelForCausalLM.from_pretrained(resolve(model), dtype=torch.float32)
    size = len(load_tokenizer(model, key="model"))

    @torch.no_grad()
    def scores(ids: list[int]) -> Tensor:
        with _LOCK:
            return loaded(torch.tensor([ids])).logits[0, :, :size].log_softmax(-1)

    return scores


def of_uniform(size: int) -> Scores:
    """Return scores of a model that always gives token i twice the probability of token i + 1."""
    return lambda ids: (-torch.arange(size) * torch.log(torch.tensor(2.0))).log_softmax(0).expand(len(ids), size)


def answering(scores: Scores, model: str = MODEL) -> Responder:
    """Return the function that answers the requests of any program."""

    def respond(body: Json) -> tuple[int, Json]:
        ids = body.get("prompt") or body["input_ids"]
        log_p = scores(ids)
        if "input_ids" in body:
            return 200, _sglang(ids, log_p, body["top_logprobs_num"])
        form = _echo if body.get("echo") else _vllm
        return 200, {"model": model, "choices": [form(ids, log_p, body["logprobs"])]}

    return respond


def _top(log_p: Tensor, k: int, *first: int) -> dict[int, float]:
    """Return log-probabilities of tokens `first` and then of the k likeliest, keyed by id, in vLLM's order."""
    tokens = [*first, *(token for token in log_p.topk(k).indices.tolist() if token not in first)]
    return dict(zip(tokens, log_p[tokens].tolist(), strict=True))


def _vllm(ids: list[int], log_p: Tensor, k: int) -> Json:
    rows = [_top(row, k, next_token) for row, next_token in zip(log_p, ids[1:], strict=False)]
    prompt = [{str(token): {"logprob": p, "decoded_token": "…"} for token, p in row.items()} for row in rows]
    last = {f"token_id:{token}": p for token, p in _top(log_p[-1], k).items()}
    return {"prompt_token_ids": ids, "prompt_logprobs": [None, *prompt], "logprobs": {"top_logprobs": [last]}}


def _echo(ids: list[int], log_p: Tensor, k: int) -> Json:
    top = [{f"token_id:{token}": p for token, p in _top(row, k).items()} for row in log_p]
    realised = [float(row[next_token]) for row, next_token in zip(log_p, ids[1:], strict=False)]
    sampled = int(log_p[-1].argmax())
    return {
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in (*ids, sampled)],
            "token_logprobs": [None, *realised, float(log_p[-1].max())],
            "top_logprobs": [None, *top],
        }
    }


def _sglang(ids: list[int], log_p: Tensor, k: int) -> Json:
    top = [[[p, token, None] for token, p in _top(row, k).items()] for row in log_p]
    # SGLang echoes the last id of the vocabulary as 0.
    echoed = [token * (token < log_p.shape[1] - 1) for token in ids]
    realised = [
        [float(row[next_token]), echo, None] for row, next_token, echo in zip(log_p, ids[1:], echoed[1:], strict=False)
    ]
    meta = {"input_token_logprobs": [[None, echoed[0], None], *realised], "input_top_logprobs": [None, *top[:-1]]}
    return {"text": "…", "meta_info": meta | {"output_top_logprobs": [top[-1]]}}


@contextmanager
def endpoint(
    respond: Responder, model: str = MODEL, limit: int | None = LIMIT, handler: type[Handler] = Handler
) -> Iterator[tuple[str, list[Json]]]:
    """Yield the server's address and the bodies of its requests."""
    bodies: list[Json] = []

    def record(body: Json) -> tuple[int, Json]:
        bodies.append(body)
        return respond(body)

    with fake_server(record, cards=[{"id": model, "max_model_len": limit}], handler=handler) as (url, _):
        yield url, bodies
