"""Answers for people to read."""

from collections.abc import Iterator, Sequence

from nemo_opd.data.record import Message, Prompt, Rollout
from nemo_opd.evaluation.tasks import Answer, Answered, EvaluationResult
from nemo_opd.logging.samples import ShownAnswer


def shown_answers(result: EvaluationResult, step: int, limit: int, teacher: str | None = None) -> list[ShownAnswer]:
    """The answer to each of the first `limit` questions: the likeliest where it was taken, else the first sampled.

    teacher: the name of the one that was asked; None: the student was.
    """
    return [
        _shown(question, question.greedy or question.sampled[0], step, teacher, is_greedy=question.greedy is not None)
        for question in result.questions[:limit]
    ]


def all_answers(result: EvaluationResult, step: int) -> Iterator[ShownAnswer]:
    for question in result.questions:
        if question.greedy is not None:
            yield _shown(question, question.greedy, step, is_greedy=True)
        for answer in question.sampled:
            yield _shown(question, answer, step, is_greedy=False)


def _shown(
    question: Answered, answer: Answer, step: int, teacher: str | None = None, *, is_greedy: bool
) -> ShownAnswer:
    rollout = answer.rollout
    return ShownAnswer(
        step=step,
        question=question.prompt.index,
        kind="greedy" if is_greedy else "sampled",
        sample=rollout.sample,
        prompt=prompt_text(question.prompt),
        answer=question.prompt.answer,
        response=response_text(rollout),
        reward=answer.reward,
        finish_reason=rollout.finish_reason,
        num_tokens=rollout.num_sampled,
        teacher=teacher,
    )


def prompt_text(prompt: Prompt) -> str:
    return prompt.content if isinstance(prompt.content, str) else conversation(prompt.content)


def response_text(rollout: Rollout) -> str:
    """What the model said; where others answered it, the conversation after the prompt."""
    if len(rollout.responses) == 1 or isinstance(rollout.prompt.content, str):
        return "\n".join(rollout.responses)
    return conversation(rollout.messages[len(rollout.prompt.content) :])


def conversation(messages: Sequence[Message]) -> str:
    """`role: content`, a blank line between messages; of one message of the user the content alone."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)
