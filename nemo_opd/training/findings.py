"""What is suspicious about a run, in sentences, and what makes it impossible (a ConfigError or DataError)."""

from collections.abc import Iterator, Sequence

from transformers import GenerationConfig

from nemo_opd.alignment.template_roles import template_roles
from nemo_opd.config.data import HubDataset
from nemo_opd.config.model import Model
from nemo_opd.config.on_policy import longest_prompt
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher
from nemo_opd.data.files import resolve_files
from nemo_opd.errors import ConfigError, DataError
from nemo_opd.models.load import load_config
from nemo_opd.rollout.hf import end_ids
from nemo_opd.training.side import Side
from nemo_opd.training.survey import GOOD_COVERAGE, Survey


def check_positions(config: RunConfig, student: Side, teachers: Sequence[Side]) -> list[str]:
    """Warnings where sequences go beyond what a model with rotary positions is made for.

    Raises ConfigError where a model has no more positions, or the student would be asked to sample beyond its own.
    """
    warnings = []
    if config.rollout is not None and student.positions is not None:
        require_room_to_sample(config, student.positions)
    asked = [("train.max_length", config.train.max_length, config.student.model, student)]
    for i, (settings, side) in enumerate(zip(config.active_teachers, teachers, strict=True)):
        if not isinstance(settings, CrossTokenizerTeacher):
            asked.append(("train.max_length", config.train.max_length, settings.model, side))
        elif settings.max_length is not None:
            asked.append((f"teachers.{i}.max_length", settings.max_length, settings.model, side))
    for key, length, model, side in asked:
        if side.positions is None or length <= side.positions:
            continue
        if not side.has_rotary_positions:
            raise ConfigError(
                f"{key}={length}: {model} has a table of {side.positions} positions (max_position_embeddings) and can "
                f"read no more; write {key}={side.positions} or less"
            )
        warnings.append(
            f"{key}={length}: {model} is made for {side.positions} positions (max_position_embeddings in its "
            f"config.json), and its predictions beyond them are poor; write {key}={side.positions} or less, or correct "
            "config.json where the model was trained on longer texts"
        )
    return warnings


def require_room_to_sample(config: RunConfig, positions: int) -> None:
    """Raises ConfigError where a prompt and what is sampled may need more positions than the student has."""
    rollout, longest = config.rollout, config.train.max_length
    assert rollout is not None
    asked = 0 if config.evaluation is None else config.evaluation.max_new_tokens or 0
    new = max(rollout.max_new_tokens, asked)
    needed = longest if config.environment is not None else min(longest, longest_prompt(config) + new)
    if needed > positions:
        raise ConfigError(
            f"train.max_length={longest}: prompts and what is sampled (rollout.max_new_tokens={rollout.max_new_tokens})"
            f" may have {needed} tokens, and {config.student.model} has {positions} positions "
            f"(max_position_embeddings); write train.max_length={positions} or less"
        )


def unseen_ends(config: RunConfig, student: Side, teachers: Sequence[Side]) -> Iterator[str]:
    """A warning for each teacher with the student's tokenizer that ends with a token which does not end the student."""
    ours = end_ids(student.tokenizer, generation_config(config.student, "student"))
    for i, (settings, side) in enumerate(zip(config.active_teachers, teachers, strict=True)):
        theirs = own_ends(side)
        if isinstance(settings, CrossTokenizerTeacher) or not ours or not theirs - ours:
            continue
        names, own = (
            " and ".join(str(side.tokenizer.convert_ids_to_tokens(index)) for index in sorted(ids))
            for ids in (theirs - ours, ours)
        )
        yield (
            f"teachers.{i} ({settings.name}) ends what it says with {names}, and the student ends with {own}: what it "
            f"learns from that teacher would not stop it; write student.tokenizer={settings.tokenizer_source[1]} if "
            "the student is to end so too"
        )


def own_ends(side: Side) -> frozenset[int]:
    """What a model writes last by its tokenizer: the end of a turn where there is a template, else of a text."""
    tokenizer = side.tokenizer
    turns = [content for content, role in template_roles(tokenizer).items() if role == "end_of_turn"]
    ends = turns or ([] if tokenizer.eos_token is None else [tokenizer.eos_token])
    return frozenset(tokenizer.get_vocab()[content] for content in ends)


def generation_config(settings: Model, key: str) -> GenerationConfig:
    return GenerationConfig.from_model_config(load_config(settings.model, key=f"{key}.model"))


def seen_in_training(config: RunConfig) -> Iterator[str]:
    """A warning for what data.validation and data.train both name."""
    for kind, value in config.data.validation.given.items():
        trained_on, key = config.data.train.given.get(kind), f"data.validation.{kind}"
        if isinstance(value, HubDataset):
            shared = [value.path] if value == trained_on else []
        elif trained_on is None or isinstance(trained_on, HubDataset):
            shared = []
        else:
            files = {path.resolve() for path in resolve_files(trained_on, key=f"data.train.{kind}")}
            shared = [str(path) for path in resolve_files(value, key=key) if path.resolve() in files]
        for name in shared:
            yield (
                f"{key}: {name} is in data.train too, and what the student has been trained on says little of how well "
                "it does on other texts; validate on those"
            )


def of_the_texts(config: RunConfig, found: Survey) -> list[str]:
    """Warnings of texts without a token to learn, and of teachers that say nothing about much of them.

    Raises DataError where there is nothing to learn at all, or from no teacher.
    """
    warnings = []
    if found.num_without_label:
        what = "token to learn" if config.data.messages_key is None else "turn of the assistant"
        empty = (
            f"{found.num_without_label} of {found.num_texts} texts of data.train that were looked at have no {what} "
        )
        empty += f"within train.max_length={config.train.max_length}"
        if found.is_complete and found.num_without_label == found.num_texts:
            raise DataError(f"{empty}, and there are no others; raise train.max_length, or use other texts")
        warnings.append(f"{empty}; leave them out, or raise train.max_length where they are longer")
    low = {i: share for i, share in enumerate(found.coverage) if share is not None and share < GOOD_COVERAGE}
    said = {
        i: f"teachers.{i} ({config.active_names[i]}): {low_coverage(config, i, low[i], found.num_texts)}" for i in low
    }
    if found.coverage and all(share == 0 for share in found.coverage):
        raise DataError("; ".join(said.values()))
    return [*warnings, *said.values()]


def low_coverage(config: RunConfig, i: int, share: float, num_texts: int) -> str:
    return f"only {share:.0%} of the scored tokens in {num_texts} texts get KD from it; {reason_of_low(config, i)}"


def reason_of_low(config: RunConfig, i: int) -> str:
    settings = config.active_teachers[i]
    if isinstance(settings, CrossTokenizerTeacher):
        if settings.max_length is not None:
            return f"teachers.{i}.max_length={settings.max_length} may cut it: leave it out"
        if config.data.messages_key is not None and settings.equal_history != "none":
            return (
                f"teachers.{i}.equal_history={settings.equal_history} leaves out what lies behind contents that the "
                "chat templates write differently, such as the thinking of earlier turns; write "
                f"teachers.{i}.equal_history=none to compare it all the same, or give a chat_template that keeps them"
            )
        if config.data.messages_key is not None:
            return "the chat templates write different contents, such as thinking; give a chat_template that keeps them"
    if config.term(i).type == "strict":
        return "loss.type=strict reads only tokens that are the same on both sides; p_kl reads the others too"
    return "the inspect tool shows how the tokenizers differ"
