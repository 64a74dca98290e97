"""Validation texts continued by the student, for readers of the report."""

import numpy as np

from nemo_opd.alignment.token_roles import stop_ids
from nemo_opd.logging.questions import ShownAnswer
from nemo_opd.models.load import tokenizer_of
from nemo_opd.preflight.plan import Plan
from nemo_opd.training.models import Models

_MAX_PROMPT, _NUM_NEW = 48, 32
"""Tokens of a text's start, and of its continuation."""


def continued_texts(plan: Plan, models: Models, step: int) -> list[ShownAnswer]:
    """Return the likeliest continuations of the first validation texts.

    Empty without any, with `continued_texts=0`, and on-policy, where the report has rollouts and answers.
    The prompt of a text is at most its first half; of a conversation, all before the first learned message. Texts that
    leave no room in `train.max_length` are left out.
    """
    number = plan.config.logging.continued_texts
    if plan.data.validation is None or not number or plan.config.rollout is not None:
        return []
    batch = next(plan.data.validation_batches(number)).student
    texts = [ids[:length].numpy().astype(np.int32) for ids, length in zip(batch.ids, batch.lengths, strict=True)]
    starts = [_prompt_length(mask.numpy(), len(ids)) for mask, ids in zip(batch.loss_mask, texts, strict=True)]
    longest = plan.config.train.max_length - _NUM_NEW
    rows = [row for row, start in enumerate(starts) if 0 < start <= longest]
    if not rows:
        return []
    tokenizer = tokenizer_of(plan.config.student, key="student")
    ends = stop_ids(tokenizer)
    continuations = models.continue_greedily([texts[row][: starts[row]] for row in rows], _NUM_NEW)
    shown = []
    for row, ids in zip(rows, continuations, strict=True):
        end = next((i for i, token in enumerate(ids) if token in ends), None)
        prompt, rest = np.split(texts[row], [starts[row]])
        shown.append(
            ShownAnswer(
                step=step,
                question=row,
                kind="continued",
                sample=0,
                prompt=str(tokenizer.decode(prompt)),
                answer=str(tokenizer.decode(rest[:_NUM_NEW], skip_special_tokens=True)),
                response=str(tokenizer.decode(ids[:end], skip_special_tokens=True)),
                reward=None,
                finish_reason="length" if end is None else "stop",
                num_tokens=_NUM_NEW if end is None else end + 1,
            )
        )
    return shown


def _prompt_length(loss_mask: np.ndarray, length: int) -> int:
    """Return the number of tokens to continue. loss_mask: [S], the tokens to learn; length: tokens of the text."""
    first = int(loss_mask.argmax())  # 1 in a text without a chat template
    return first if first > 1 else min(_MAX_PROMPT, length // 2)
