"""Questions of a set, as they are asked."""

from dataclasses import replace

from nemo_opd.config.evaluation import QuestionSet
from nemo_opd.data.context import Context
from nemo_opd.data.prompts import read_prompts
from nemo_opd.data.record import Prompt
from nemo_opd.data.sources import load_documents
from nemo_opd.errors import DataError
from nemo_opd.evaluation.inputs import AskedSet
from nemo_opd.progress import working
from nemo_opd.rewards import check_answers


def read_questions(asked: AskedSet) -> list[Prompt]:
    """Return the questions, with the set's prompt around them.

    Raises DataError, with the row, for a question that cannot be read or does not fit the reward.
    """
    layout = asked.layout
    with working(f"reading {asked.key}"):
        documents = load_documents(asked.settings.data, layout, key=asked.key)
        prompts = read_prompts(documents, range(len(documents)), layout.columns)
    check_answers(asked.reward, prompts, source=asked.key)
    settings = asked.settings.context if isinstance(asked.settings, QuestionSet) else None
    if settings is None:
        return prompts
    context = Context(settings, {name: name for name in settings.fields}, asked.prefix.rstrip("."))
    return [_within(context, prompt, asked.key) for prompt in prompts]


def _within(context: Context, prompt: Prompt, key: str) -> Prompt:
    try:
        return replace(prompt, content=context.content(prompt.content, prompt.row))
    except DataError as error:
        raise DataError(f"{key}: row {prompt.index} (counted from 0 over all files): {error}") from error
