"""Conversion of answers for samples.jsonl and the report."""

from collections.abc import Iterator, Sequence

from nemo_opd.alignment.chat_messages import content_text
from nemo_opd.data.record import Message, Rollout
from nemo_opd.evaluation.tasks import Answer, AnsweredQuestion, EvaluationResult
from nemo_opd.logging.samples import ShownAnswer


def shown_answers(result: EvaluationResult, step: int, limit: int, teacher: str | None = None) -> list[ShownAnswer]:
    """Return one answer to each of the first `limit` questions: the greedy one if there is one, else the first sample.

    teacher: name of the teacher that answered, or None for the student.
    """
    return [
        _convert(
            question,
            question.greedy or question.sampled[0],
            step,
            result.name,
            teacher,
            is_greedy=question.greedy is not None,
        )
        for question in result.questions[:limit]
    ]


def all_answers(result: EvaluationResult) -> Iterator[ShownAnswer]:
    """Yield all answers, question by question, with step 0."""
    for question in result.questions:
        if question.greedy is not None:
            yield _convert(question, question.greedy, 0, result.name, is_greedy=True)
        for answer in question.sampled:
            yield _convert(question, answer, 0, result.name, is_greedy=False)


def _convert(
    question: AnsweredQuestion, answer: Answer, step: int, name: str, teacher: str | None = None, *, is_greedy: bool
) -> ShownAnswer:
    rollout, content = answer.rollout, question.prompt.content
    return ShownAnswer(
        step=step,
        question=question.prompt.index,
        kind="greedy" if is_greedy else "sampled",
        sample=rollout.sample,
        prompt=content if isinstance(content, str) else _conversation(content),
        answer=question.prompt.answer,
        response=_response_text(rollout),
        reward=answer.reward,
        finish_reason=rollout.finish_reason,
        num_tokens=rollout.num_sampled,
        teacher=teacher,
        set=name,
    )


def _response_text(rollout: Rollout) -> str:
    """Return the model's text, or the conversation after the prompt if an environment took part."""
    if len(rollout.responses) == 1 or isinstance(rollout.prompt.content, str):
        return "\n".join(rollout.responses)
    return _conversation(rollout.messages[len(rollout.prompt.content) :])


def _conversation(messages: Sequence[Message]) -> str:
    """Join messages as `role: content` with blank lines between; return a single user message's content only."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return content_text(messages[0])
    return "\n\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)
