"""Rollouts as a reward sees them."""

import numpy as np

from nemo_opd.data.row_types import Prompt, Rollout


def rollout(response: str, answer: str | None = None, *, env_reward: float | None = None) -> Rollout:
    return Rollout(
        prompt=Prompt(7, "Q:", answer=answer),
        sample=2,
        ids=np.array([5, 6, 7], dtype=np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=np.zeros(3, dtype=np.float32),
        behaviour_logprobs=np.zeros(3, dtype=np.float32),
        turns=np.array([[1, 3]], dtype=np.int32),
        responses=(response,),
        messages=(),
        finish_reason="stop",
        version=0,
        env_reward=env_reward,
    )
