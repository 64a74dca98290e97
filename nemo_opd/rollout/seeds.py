"""What is random about rollouts, from the run's seed and the place in the run alone."""

import math
from collections.abc import Sequence

import numpy as np

_WORD = 2**32


def turn_seed(seed: int, step: int, prompt: int, sample: int, turn: int) -> int:
    """0 ≤ seed < 2^63 from the run's seed, the step, the prompt's row, which of its rollouts, and the turn.

    Nothing else decides it: not the batch, the rank or the order. All are at least 0, and below 2^32 but for the run's.
    """
    # A fixed number of words: SeedSequence takes [1] and [1, 0] for the same.
    words = [seed % _WORD, seed // _WORD, step, prompt, sample, turn]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 1


def chosen_share(prompts: Sequence[object], share: float, seed: int, step: int) -> list[bool]:
    """Which of a batch's prompts belong to a share of them: random ones, and as many on average over steps."""
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed % _WORD, seed // _WORD, step])))
    number = math.floor(share * len(prompts) + random.random())
    is_chosen = np.zeros(len(prompts), np.bool_)
    is_chosen[random.permutation(len(prompts))[:number]] = True
    return is_chosen.tolist()
