"""Which requests fit a model."""

from collections.abc import Sequence

from nemo_opd.errors import RolloutError
from nemo_opd.rollout.base import Request


def check_lengths(requests: Sequence[Request], limit: int | None) -> None:
    """Raises RolloutError for a request that has no prompt, or that may become longer than `limit` tokens."""
    for request in requests:
        prompt, new = len(request.prompt_ids), request.max_new_tokens
        if not prompt or new < 1:
            raise RolloutError(
                f"a request has {prompt} prompt tokens and max_new_tokens={new}; both must be 1 at least: drop empty "
                "prompts"
            )
        if limit is not None and prompt + new > limit:
            raise RolloutError(
                f"a prompt of {prompt} tokens and {new} new ones make {prompt + new}, and the model has {limit} "
                "positions; lower rollout.max_new_tokens or rollout.max_prompt_length"
            )
