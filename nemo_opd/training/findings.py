"""Preflight's warnings about models and data, and errors where a run is impossible."""

from collections.abc import Iterator, Sequence

from transformers import GenerationConfig

from nemo_opd.alignment.template_roles import template_roles
from nemo_opd.config.data import HubDataset
from nemo_opd.config.model import Student
from nemo_opd.config.on_policy import longest_prompt
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher, Teacher
from nemo_opd.data.documents import Routed, read_documents
from nemo_opd.data.files import resolve_files
from nemo_opd.errors import ConfigError, DataError
from nemo_opd.models.load import load_config
from nemo_opd.rollout.hf import end_ids
from nemo_opd.rollout.renderer import encode
from nemo_opd.training.corpus import Corpus
from nemo_opd.training.model_info import ModelInfo
from nemo_opd.training.survey import GOOD_COVERAGE, Survey, sampled_rows

_LOOKED_AT = 100_000
"""Characters of a text in which special tokens are looked for."""
_SHORT_ROW = 0.75
"""Share of `train.max_length` that packed rows can fill, below which a warning is given."""


def check_positions(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> list[str]:
    """Return warnings where sequences are longer than a model with rotary positions is made for.

    Raises ConfigError where a model has no more positions, or the student would sample beyond its positions.
    """
    warnings: list[str] = []
    if config.rollout is not None:
        if student.positions is not None:
            require_room_to_sample(config, student.positions)
        warnings += _warn_of_crossing_samples(config, student)
    lengths: list[tuple[str, int, Student | Teacher, ModelInfo]] = []
    lengths.append(("train.max_length", config.train.max_length, config.student, student))
    for i, (settings, info) in enumerate(zip(config.active_teachers, teachers, strict=True)):
        if settings.served is not None:
            _check_served(config, i, info)
        elif not isinstance(settings, CrossTokenizerTeacher):
            lengths.append(("train.max_length", config.train.max_length, settings, info))
        elif settings.max_length is not None:
            lengths.append((f"teachers.{i}.max_length", settings.max_length, settings, info))
    for key, length, model, info in lengths:
        warnings += _warn_of_growing_factors(key, length, model, info)
        if info.positions is None or length <= info.positions:
            continue
        if not info.has_rotary_positions:
            raise ConfigError(
                f"{key}={length}: {model.reference} has a table of {info.positions} positions "
                f"(max_position_embeddings) and can read no more; write {key}={info.positions} or less"
            )
        warnings.append(
            f"{key}={length}: {model.reference} is made for {info.positions} positions (max_position_embeddings in "
            f"its config.json), and its predictions beyond them are poor; write {key}={info.positions} or less, or "
            "correct config.json where the model was trained on longer texts"
        )
    return warnings


def _warn_of_growing_factors(key: str, length: int, model: Student | Teacher, info: ModelInfo) -> Iterator[str]:
    """Yield a warning for texts whose results depend on the texts that are read before and beside them.

    Raises ConfigError if context parallelism would give the ranks different factors.
    """
    rotary = info.rotary
    if rotary is None or not rotary.is_beyond(length):
        return
    if model.parallelism.cp > 1:
        raise ConfigError(
            f"{key}={length}: {model.reference} reads texts of more than {rotary.length} tokens with other rotary "
            "factors (longrope or dynamic in its config.json), of which context-parallel ranks would choose different "
            f"ones; write {key}={rotary.length} or less, or parallelism.cp=1 for this model"
        )
    if rotary.grows:
        yield (
            f"{key}={length}: the rotary factors of {model.reference} (rope_type dynamic) for texts of more than "
            f"{rotary.length} tokens are those of the longest text that was read with them or before, so results "
            f"depend on the order of texts; write {key}={rotary.length} or less"
        )


def _warn_of_crossing_samples(config: RunConfig, student: ModelInfo) -> Iterator[str]:
    """Yield a warning for samples that begin with other rotary factors than the whole is trained on with."""
    rotary, needed = student.rotary, _longest_sample(config)
    if rotary is not None and rotary.is_beyond(needed):
        yield (
            f"train.max_length={config.train.max_length}: {config.student.model} reads texts of more than "
            f"{rotary.length} tokens with other rotary factors (longrope or dynamic in its config.json), so a sample "
            "that grows beyond is trained on with other probabilities than it was sampled with; write "
            f"train.max_length={rotary.length} or less, or watch train/mismatch"
        )


def _check_served(config: RunConfig, i: int, info: ModelInfo) -> None:
    """Raise ConfigError where servers would be asked about longer sequences than they read."""
    settings = config.active_teachers[i]
    key, length = "train.max_length", config.train.max_length
    if isinstance(settings, CrossTokenizerTeacher):
        key, length = f"teachers.{i}.max_length", settings.max_length or 0
    if info.positions is not None and length > info.positions:
        raise ConfigError(
            f"{key}={length}: the servers of {settings.name} can be asked about {info.positions} tokens, one less than "
            f"their max_model_len; write {key}={info.positions} or less, or start them with --max-model-len "
            f"{length + 1} or more"
        )


def require_room_to_sample(config: RunConfig, positions: int) -> None:
    """Raise ConfigError where a prompt and its response may need more positions than the student has."""
    assert config.rollout is not None
    needed = _longest_sample(config)
    if needed > positions:
        raise ConfigError(
            f"train.max_length={config.train.max_length}: prompts and what is sampled "
            f"(rollout.max_new_tokens={config.rollout.max_new_tokens}) may have {needed} tokens, and "
            f"{config.student.model} has {positions} positions (max_position_embeddings); "
            f"write train.max_length={positions} or less"
        )


def _longest_sample(config: RunConfig) -> int:
    """Return the largest number of tokens of a prompt and what the student samples after it."""
    assert config.rollout is not None
    answer = 0 if config.evaluation is None else config.evaluation.max_new_tokens or 0
    new, longest = max(config.rollout.max_new_tokens, answer), config.train.max_length
    return longest if config.environment is not None else min(longest, longest_prompt(config) + new)


def warn_of_other_ends(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> Iterator[str]:
    """Yield a warning for each teacher with the student's tokenizer whose last token does not end the student."""
    model = load_config(config.student.model, key="student.model")
    ours = end_ids(student.tokenizer, GenerationConfig.from_model_config(model))
    for i, (settings, info) in enumerate(zip(config.active_teachers, teachers, strict=True)):
        theirs = _own_ends(info)
        if isinstance(settings, CrossTokenizerTeacher) or not ours or not theirs - ours:
            continue
        names, own = (
            " and ".join(str(info.tokenizer.convert_ids_to_tokens(index)) for index in sorted(ids))
            for ids in (theirs - ours, ours)
        )
        yield (
            f"teachers.{i} ({settings.name}) ends what it says with {names}, and the student ends with {own}: what it "
            f"learns from that teacher would not stop it; write student.tokenizer={settings.tokenizer_source[1]} if "
            "the student shall end with the same token"
        )


def _own_ends(info: ModelInfo) -> frozenset[int]:
    """Return the tokens that end a model's responses: the template's end of a turn, else the end of a text."""
    tokenizer = info.tokenizer
    turns = [content for content, role in template_roles(tokenizer).items() if role == "end_of_turn"]
    ends = turns or ([] if tokenizer.eos_token is None else [tokenizer.eos_token])
    return frozenset(tokenizer.get_vocab()[content] for content in ends)


def warn_of_shared_data(config: RunConfig) -> Iterator[str]:
    """Yield a warning for each file or dataset that is in both data.validation and data.train."""
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
                f"{key}: {name} is in data.train too, and results on training texts say little about other texts; "
                "validate on those"
            )


def check_texts(config: RunConfig, statistics: Survey) -> list[str]:
    """Return warnings for texts without a token to learn, and for teachers that cover few tokens.

    Raises DataError where there is nothing to learn at all, or from no teacher.
    """
    warnings, num_texts = [], statistics.num_texts
    if statistics.num_without_label:
        what = "token to learn" if config.data.messages_key is None else "turn of the assistant"
        empty = f"{statistics.num_without_label} of {num_texts} texts of data.train that were looked at have no {what}"
        raised = ""
        if not config.packs_documents:
            empty += f" within train.max_length={config.train.max_length}"
            raised = ", or raise train.max_length where they are longer"
        if statistics.is_complete and statistics.num_without_label == num_texts:
            raise DataError(f"{empty}, and there are no others; use other texts{raised}")
        warnings.append(f"{empty}; leave them out{raised}")
    low = {i: share for i, share in enumerate(statistics.coverage) if share is not None and share < GOOD_COVERAGE}
    uncovered = [
        f"teachers.{i} ({config.active_names[i]}): only {share:.0%} of the scored tokens in {num_texts} texts "
        f"get KD from it; {_low_coverage_advice(config, i)}"
        for i, share in low.items()
    ]
    if statistics.coverage and all(share == 0 for share in statistics.coverage):
        raise DataError("; ".join(uncovered))
    unfit = [
        f"teachers.{i} ({config.active_names[i]}): in {num_texts} texts {sentence}"
        for i, targets in enumerate(statistics.targets)
        if targets is not None
        for sentence in targets.warnings(config.term(i))
    ]
    return [*warnings, *uncovered, *unfit]


def warn_of_spelled_tokens(config: RunConfig, data: Corpus, student: ModelInfo) -> Iterator[str]:
    """Yield a warning if texts spell special tokens of the student, as rendered conversations and HTML do."""
    if config.data.messages_key is not None or config.data.special_tokens == "text":
        return
    documents = read_documents(data.train, list(sampled_rows(len(data.train))))
    texts = [document.content if isinstance(document, Routed) else document for document in documents]
    ids = [set(encode(student.tokenizer, text[:_LOOKED_AT])) for text in texts if isinstance(text, str)]
    unknown = student.tokenizer.unk_token_id
    special = {i: content for i, content in student.pieces.special_contents.items() if i != unknown}
    if number := sum(not special.keys().isdisjoint(of_text) for of_text in ids):
        spelled = sorted(special[token].decode() for token in special.keys() & set().union(*ids))
        yield (
            f"{number} of {len(ids)} texts of data.train that were looked at spell special tokens of the student "
            f"({', '.join(spelled[:3])}), which are read as such: if a chat template has rendered these texts, give "
            "the conversations instead, by data.messages_key; if they are characters of a document, write "
            "data.special_tokens=text"
        )


def warn_of_short_rows(config: RunConfig, limits: Sequence[int], statistics: Survey) -> Iterator[str]:
    """Yield a warning where a teacher's limit ends packed rows long before the student's.

    limits: tokens of a row for the student and for each active teacher.
    """
    rates = statistics.tokens_per_byte
    for i, (limit, rate) in enumerate(zip(limits[1:], rates[1:], strict=True)):
        fitting = round(limit * rates[0] / rate) if rate else limits[0]
        if fitting < _SHORT_ROW * limits[0]:
            settings = config.active_teachers[i]
            own = settings.max_length if isinstance(settings, CrossTokenizerTeacher) else None
            reason = f"teachers.{i}.max_length={limit}" if own else f"{limit} positions of teachers.{i}.model"
            ways = f"raise teachers.{i}.max_length" if own else "take a teacher that reads longer texts"
            yield (
                f"train.max_length={limits[0]}: the {reason} end packed rows after about {fitting} tokens of the "
                f"student, and every document is cut there for all models; write train.max_length={fitting}, or {ways}"
            )


def _low_coverage_advice(config: RunConfig, i: int) -> str:
    settings = config.active_teachers[i]
    context, is_chat = settings.context, config.data.messages_key is not None
    if context is not None and context.replaces_question and is_chat:
        return (
            f"teachers.{i}.context.{'template' if context.key is None else 'key'} has it compare only the answer to "
            "the user's last message, as far as its positions reach; make a row of each answer, or shorten the context"
        )
    if isinstance(settings, CrossTokenizerTeacher):
        if settings.max_length is not None:
            return f"teachers.{i}.max_length={settings.max_length} may cut it: leave it out"
        if is_chat and settings.equal_history != "none":
            return (
                f"teachers.{i}.equal_history={settings.equal_history} leaves out what follows contents that the "
                "chat templates write differently, such as the thinking of earlier turns; write "
                f"teachers.{i}.equal_history=none to compare it all the same, or give a chat_template that keeps them"
            )
        if is_chat:
            return "the chat templates write different contents, such as thinking; give a chat_template that keeps them"
    if config.term(i).type == "strict":
        return "loss.type=strict reads only tokens that are the same on both sides; p_kl reads the others too"
    if context is not None and not isinstance(settings, CrossTokenizerTeacher):
        return f"teachers.{i}.context leaves too few of its positions for responses; shorten it"
    return "the inspect tool shows how the tokenizers differ"
