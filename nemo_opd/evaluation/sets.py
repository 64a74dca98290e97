"""Reading and asking of a set's questions."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from nemo_opd.config.environment import Environment
from nemo_opd.config.evaluation import QuestionSet
from nemo_opd.data.context import Context
from nemo_opd.data.prompts import read_prompts
from nemo_opd.data.record import Prompt
from nemo_opd.data.sources import load_documents
from nemo_opd.errors import DataError
from nemo_opd.evaluation.inputs import ResolvedSet
from nemo_opd.evaluation.tasks import EvaluationResult, evaluate_task
from nemo_opd.progress import working
from nemo_opd.rewards import RewardFunction, check_answers
from nemo_opd.rollout.base import Generator, Sampling
from nemo_opd.rollout.collect import Collector
from nemo_opd.rollout.environments import build_environment
from nemo_opd.rollout.renderer import Renderer


def read_questions(resolved: ResolvedSet) -> list[Prompt]:
    """Return the questions, with the set's prompt around them.

    Raises DataError, naming the row, if a question cannot be read or does not fit the reward.
    """
    layout = resolved.layout
    with working(f"reading {resolved.key}"):
        documents = load_documents(resolved.settings.data, layout, key=resolved.key)
        prompts = read_prompts(documents, range(len(documents)), layout.columns)
    check_answers(resolved.reward, prompts, source=resolved.key)
    settings = resolved.settings.context if isinstance(resolved.settings, QuestionSet) else None
    if settings is None:
        return prompts
    context = Context(settings, {name: name for name in settings.fields}, resolved.prefix.rstrip("."))
    return [_within(context, prompt, resolved.key) for prompt in prompts]


def _within(context: Context, prompt: Prompt, key: str) -> Prompt:
    try:
        return replace(prompt, content=context.content(prompt.content, prompt.row))
    except DataError as error:
        raise DataError(f"{key}: row {prompt.index} (counted from 0 over all files): {error}") from error


def ask(
    resolved: ResolvedSet,
    questions: Sequence[Prompt],
    reward: RewardFunction,
    engine: Generator,
    renderer: Renderer,
    *,
    max_new_tokens: int,
    max_length: int,
    environment: Environment | None,
    seed: int,
    failures_are_wrong: bool,
) -> EvaluationResult:
    """Ask a model the questions of a set.

    max_new_tokens: limit for a turn. max_length: limit for a sequence. Raises the errors of the engine, the environment
    and `evaluate_task`.
    """
    settings = resolved.settings
    collector = partial(
        Collector,
        engine,
        renderer,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        environment=None if environment is None else build_environment(environment),
        seed=seed,
        stop=settings.stop,
    )
    sampled = collector(sampling=Sampling(settings.temperature, settings.top_p, settings.top_k, needs_raw=False))
    greedy = collector(sampling=Sampling(temperature=0.0, needs_raw=False)) if settings.greedy else None
    result = evaluate_task(
        greedy, sampled, questions, reward, settings, name=resolved.name, failures_are_wrong=failures_are_wrong
    )
    return replace(result, levels=resolved.levels(questions))
