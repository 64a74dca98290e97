"""Question sets with their columns and rewards, and checks of an evaluation before PyTorch's slow import."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from nemo_opd.config.data import Data
from nemo_opd.config.evaluation import EvaluationConfig, Questions, QuestionSet, QuestionSets, QuestionSource
from nemo_opd.config.reward import Reward, calls_users_code
from nemo_opd.data.columns import Layout, chat_layout, text_layout
from nemo_opd.data.row_types import Prompt, answer_text
from nemo_opd.data.source_files import require_suitable
from nemo_opd.demo import is_demo
from nemo_opd.errors import ConfigError, run_all
from nemo_opd.evaluation.benchmark_tasks import check_tasks, require_tasks
from nemo_opd.extras import require_extras, require_installed, require_library
from nemo_opd.logging.terminal import loading
from nemo_opd.models.folder import check_folder, check_tokenizer, read_template
from nemo_opd.rewards import RewardFunction, build_reward


@dataclass(frozen=True, slots=True)
class ResolvedSet:
    """A set of questions in the settings, with defaults from other sections filled in."""

    name: str
    """Empty for the set without a name."""
    settings: Questions
    reward: Reward
    prefix: str
    """Prefix of the settings' keys, such as `evaluation.sets.gsm8k.`."""
    text_key: str
    messages_key: str | None
    """The column of conversations, or None if questions are texts."""
    tools_key: str | None
    prompt_key: tuple[str, ...]
    """Instead of `messages_key`: columns with the user's message."""

    @property
    def key(self) -> str:
        """Key of the data."""
        return f"{self.prefix}data"

    @property
    def reward_key(self) -> str:
        """Key of the set's reward, or of the reward of all sets."""
        has_reward = isinstance(self.settings, QuestionSet) and self.settings.reward is not None
        return f"{self.prefix}reward" if has_reward else "reward"

    @property
    def label(self) -> str:
        """Name in messages."""
        return self.name or "questions"

    @property
    def is_chat(self) -> bool:
        return self.messages_key is not None or bool(self.prompt_key)

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Additional columns that settings name, as pairs of column and setting."""
        columns = [(name, f"{self.reward_key}.{setting}") for name, setting in self.reward.named_columns.items()]
        if self.settings.level_key is not None:
            columns.append((self.settings.level_key, f"{self.prefix}level_key"))
        if not isinstance(self.settings, QuestionSet) or self.settings.context is None:
            return columns
        context = self.settings.context
        setting_keys = {"template": "prompt", "system_prompt": "system_prompt"}
        return [*((name, f"{self.prefix}{setting_keys[context.named_in(name)]}") for name in context.fields), *columns]

    def levels(self, questions: Sequence[Prompt]) -> tuple[str, ...]:
        """Return each question's text in the column `level_key`, or an empty tuple without that setting."""
        key = self.settings.level_key
        return () if key is None else tuple(answer_text(question.row[key]) or "" for question in questions)

    @property
    def layout(self) -> Layout:
        """The columns of questions, and the columns that rewards and prompts read."""
        section = self.key if isinstance(self.settings, QuestionSet) else "data"
        settings = {key: f"{section}.{key}" for key in QuestionSource.model_fields if key.endswith("_key")}
        layout = text_layout(self.text_key, settings)
        if self.is_chat:
            layout = chat_layout(self.messages_key, self.tools_key, settings, self.prompt_key)
        layout = layout.with_prompts(self.reward.answer_column, reward=self.reward_key)
        return layout.with_fields(self.columns).for_reward(self.reward)


def resolved_sets(
    evaluation: QuestionSets, data: Data | QuestionSource, reward: Reward | None, prefix: str
) -> Iterator[ResolvedSet]:
    """Yield the sets of questions.

    data, reward: defaults for sets without these settings. prefix: prefix of the keys of `evaluation`. Raises
    ConfigError if texts have a system message, or if no questions are set.
    """
    if not (evaluation.all_sets or evaluation.benchmarks):
        way_out = f", or {prefix.rstrip('.')}=null to evaluate nothing" if prefix else ""
        raise ConfigError(
            f"{prefix}sets, {prefix}data and {prefix}benchmarks name nothing to ask; set one of them{way_out}"
        )
    for name, settings in evaluation.all_sets.items():
        if not isinstance(settings, QuestionSet):
            assert reward is not None, "checked with the settings"
            keys = data.text_key, data.messages_key, data.tools_key, data.prompt_key
            yield ResolvedSet(name, settings, reward, prefix, *keys)
            continue
        source = settings.data
        if source.text_key or source.messages_key or source.prompt_key:
            prompt = source.messages_key, source.prompt_key
        else:
            prompt = data.messages_key, data.prompt_key
        resolved = ResolvedSet(
            name,
            settings,
            settings.reward or reward,  # type: ignore[arg-type]  # checked with the settings
            f"{prefix}sets.{name}.",
            source.text_key or data.text_key,
            prompt[0],
            None if source.text_key else source.tools_key or data.tools_key,
            prompt[1],
        )
        if settings.system_prompt is not None and not resolved.is_chat:
            raise ConfigError(
                f"{resolved.prefix}system_prompt={settings.system_prompt!r}: the questions are texts, which have no "
                f"system message; write it in {resolved.prefix}prompt, or name a column of conversations as "
                f"{resolved.key}.messages_key"
            )
        yield resolved


def check_inputs(config: EvaluationConfig) -> None:
    """Raise an OPDError, with a line for each path or program in the settings that does not exist or has the wrong
    form.
    """
    checks: list[Callable[[], object]] = [lambda: check_folder(config.model, key="model")]
    if (tokenizer := config.tokenizer) is not None:
        checks.append(lambda: check_tokenizer(tokenizer, key="tokenizer"))
    if (template := config.chat_template) is not None:
        checks.append(lambda: read_template(template, key="chat_template"))
    checks += [
        lambda: require_extras(None, config.reward),
        lambda: require_installed(config.rollout),
        lambda: check_sets(resolved_sets(config, config.data, config.reward, "")),
    ]
    run_all(checks)
    check_benchmarks(config, "")  # a slow import


def check_sets(sets: Iterator[ResolvedSet]) -> None:
    """Raise an OPDError if a set's data, libraries or reward are missing or unsuitable."""
    for resolved in sets:
        require_extras(None, resolved.reward)
        require_suitable(resolved.settings.data, resolved.layout, key=resolved.key)
        if not calls_users_code(resolved.reward):
            build_set_reward(resolved).close()


def build_set_reward(resolved: ResolvedSet) -> RewardFunction:
    """Return the set's reward. Raises ConfigError, with its key, if its function or schema is missing."""
    try:
        return build_reward(resolved.reward)
    except ConfigError as error:
        raise ConfigError(f"{resolved.reward_key}{str(error).removeprefix('reward')}") from error


def check_benchmarks(evaluation: QuestionSets | None, prefix: str) -> None:
    """Raise an OPDError if benchmarks need a missing library, folder, task or file."""
    if evaluation is None or not evaluation.benchmarks or is_left_out(evaluation):
        return
    require_library("lm_eval", f"{prefix}benchmarks")
    folder = evaluation.task_folder
    if folder is not None and not is_demo(folder) and not Path(folder).expanduser().is_dir():
        raise ConfigError(f"{prefix}task_folder={folder}: there is no such folder; correct the path")
    with loading("the tasks of benchmarks"):
        if folder is None:
            require_tasks(evaluation, prefix)
        else:
            check_tasks(evaluation, prefix)


def is_left_out(evaluation: QuestionSets) -> bool:
    """Return whether to skip the benchmarks: the demo also runs without lm-eval."""
    return evaluation.task_folder is not None and is_demo(evaluation.task_folder) and find_spec("lm_eval") is None
