"""Preflight's warnings about models and data, and errors for impossible runs."""

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
from nemo_opd.training.survey import GOOD_COVERAGE, DataStatistics, sampled_rows

_CHECKED_CHARACTERS = 100_000
"""Number of leading characters of a text that are searched for special tokens."""
_SHORT_ROW = 0.75
"""Warning threshold: share of `train.max_length` that packed rows can fill."""


def check_positions(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> list[str]:
    """Return warnings for sequences longer than the positions of a model with rotary embeddings.

    Raises ConfigError if a position table is too short, or the student would sample beyond its positions.
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
                f"{key}={length}: {model.reference} has a table of only {info.positions} positions "
                f"(max_position_embeddings); set {key}={info.positions} or less"
            )
        warnings.append(
            f"{key}={length}: {model.reference} has {info.positions} positions (max_position_embeddings in its "
            f"config.json), and its predictions beyond them are poor; set {key}={info.positions} or less, or correct "
            "config.json if the model was trained on longer texts"
        )
    return warnings


def _warn_of_growing_factors(key: str, length: int, model: Student | Teacher, info: ModelInfo) -> Iterator[str]:
    """Yield a warning if results for long texts depend on the texts read before or beside them.

    Raises ConfigError if context-parallel ranks would use different rotary factors.
    """
    rotary = info.rotary
    if rotary is None or not rotary.is_beyond(length):
        return
    if model.parallelism.cp > 1:
        raise ConfigError(
            f"{key}={length}: {model.reference} uses other rotary factors for texts of more than {rotary.length} "
            "tokens (longrope or dynamic in its config.json), and context-parallel ranks would choose different ones; "
            f"set {key}={rotary.length} or less, or parallelism.cp=1 for this model"
        )
    if rotary.grows:
        yield (
            f"{key}={length}: for texts of more than {rotary.length} tokens, the rotary factors of {model.reference} "
            "(rope_type dynamic) depend on the longest text read so far, so results depend on the order of texts; set "
            f"{key}={rotary.length} or less"
        )


def _warn_of_crossing_samples(config: RunConfig, student: ModelInfo) -> Iterator[str]:
    """Yield a warning if samples may start with other rotary factors than they are trained on with."""
    rotary, needed = student.rotary, _longest_sample(config)
    if rotary is not None and rotary.is_beyond(needed):
        yield (
            f"train.max_length={config.train.max_length}: {config.student.model} uses other rotary factors for texts "
            f"of more than {rotary.length} tokens (longrope or dynamic in its config.json), so a sample that grows "
            "beyond is trained on with other probabilities than it was sampled with; set "
            f"train.max_length={rotary.length} or less, or watch train/mismatch"
        )


def _check_served(config: RunConfig, i: int, info: ModelInfo) -> None:
    """Raise ConfigError if sequences may be longer than the teacher's servers accept."""
    settings = config.active_teachers[i]
    key, length = "train.max_length", config.train.max_length
    if isinstance(settings, CrossTokenizerTeacher):
        key, length = f"teachers.{i}.max_length", settings.max_length or 0
    if info.positions is not None and length > info.positions:
        raise ConfigError(
            f"{key}={length}: the servers of {settings.name} accept {info.positions} tokens, one less than their "
            f"max_model_len; set {key}={info.positions} or less, or start them with --max-model-len {length + 1} or "
            "more"
        )


def require_room_to_sample(config: RunConfig, positions: int) -> None:
    """Raise ConfigError if a prompt and its response may exceed the student's positions."""
    assert config.rollout is not None
    needed = _longest_sample(config)
    if needed > positions:
        raise ConfigError(
            f"train.max_length={config.train.max_length}: a prompt and its response "
            f"(rollout.max_new_tokens={config.rollout.max_new_tokens}) may have {needed} tokens, but "
            f"{config.student.model} has {positions} positions (max_position_embeddings); "
            f"set train.max_length={positions} or less"
        )


def _longest_sample(config: RunConfig) -> int:
    """Return the maximum tokens of a prompt and the student's response."""
    assert config.rollout is not None
    answer = 0 if config.evaluation is None else config.evaluation.max_new_tokens or 0
    new, longest = max(config.rollout.max_new_tokens, answer), config.train.max_length
    return longest if config.environment is not None else min(longest, longest_prompt(config) + new)


def warn_of_other_ends(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> Iterator[str]:
    """Yield a warning for each teacher with the student's tokenizer whose end token does not stop the student."""
    model = load_config(config.student.model, key="student.model")
    student_ends = end_ids(student.tokenizer, GenerationConfig.from_model_config(model))
    for i, (settings, info) in enumerate(zip(config.active_teachers, teachers, strict=True)):
        other_ends = _response_ends(info) - student_ends
        if isinstance(settings, CrossTokenizerTeacher) or not student_ends or not other_ends:
            continue
        teacher_names, student_names = (
            " and ".join(str(info.tokenizer.convert_ids_to_tokens(index)) for index in sorted(ids))
            for ids in (other_ends, student_ends)
        )
        yield (
            f"teachers.{i} ({settings.name}) ends its responses with {teacher_names}, but the student stops only at "
            f"{student_names}, so an end token learned from this teacher would not stop it; set "
            f"student.tokenizer={settings.tokenizer_source[1]} to end the student with the teacher's token"
        )


def _response_ends(info: ModelInfo) -> frozenset[int]:
    """Return the tokens that end a model's responses: the template's end of turn, or the end-of-text token."""
    tokenizer = info.tokenizer
    turns = [content for content, role in template_roles(tokenizer).items() if role == "end_of_turn"]
    ends = turns or ([] if tokenizer.eos_token is None else [tokenizer.eos_token])
    return frozenset(tokenizer.get_vocab()[content] for content in ends)


def warn_of_shared_data(config: RunConfig) -> Iterator[str]:
    """Yield a warning for each file or dataset that is in both data.validation and data.train."""
    for kind, value in config.data.validation.given.items():
        train_value, key = config.data.train.given.get(kind), f"data.validation.{kind}"
        if isinstance(value, HubDataset):
            shared = [value.path] if value == train_value else []
        elif train_value is None or isinstance(train_value, HubDataset):
            shared = []
        else:
            files = {path.resolve() for path in resolve_files(train_value, key=f"data.train.{kind}")}
            shared = [str(path) for path in resolve_files(value, key=key) if path.resolve() in files]
        for name in shared:
            yield (
                f"{key}: {name} is also in data.train, and results on training texts say little about new texts; "
                "validate on other texts"
            )


def check_texts(config: RunConfig, statistics: DataStatistics) -> list[str]:
    """Return warnings for texts without a token to learn and for teachers that cover few tokens.

    Raises DataError if no text has a token to learn or no teacher covers any token.
    """
    warnings, num_texts = [], statistics.num_texts
    if statistics.num_without_label:
        label = "token to learn" if config.data.messages_key is None else "assistant turn"
        empty = f"{statistics.num_without_label} of {num_texts} checked texts of data.train have no {label}"
        longer = ""
        if not config.packs_documents:
            empty += f" within train.max_length={config.train.max_length}"
            longer = ", or raise train.max_length if they are longer"
        if statistics.is_complete and statistics.num_without_label == num_texts:
            raise DataError(f"{empty}, and data.train has no more texts; use other texts{longer}")
        warnings.append(f"{empty}; remove them{longer}")
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
    """Yield a warning if texts contain the student's special tokens, like rendered conversations or HTML."""
    if config.data.messages_key is not None or config.data.special_tokens == "text":
        return
    documents = read_documents(data.train, list(sampled_rows(len(data.train))))
    texts = [document.content if isinstance(document, Routed) else document for document in documents]
    ids = [set(encode(student.tokenizer, text[:_CHECKED_CHARACTERS])) for text in texts if isinstance(text, str)]
    unknown = student.tokenizer.unk_token_id
    special = {i: content for i, content in student.pieces.special_contents.items() if i != unknown}
    if number := sum(not special.keys().isdisjoint(text_ids) for text_ids in ids):
        spelled = sorted(special[token].decode() for token in special.keys() & set().union(*ids))
        yield (
            f"{number} of {len(ids)} checked texts of data.train contain special tokens of the student "
            f"({', '.join(spelled[:3])}), which are tokenized as such: if a chat template has rendered these texts, "
            "use the conversations instead, with data.messages_key; if the tokens are part of the text, set "
            "data.special_tokens=text"
        )


def warn_of_short_rows(config: RunConfig, limits: Sequence[int], statistics: DataStatistics) -> Iterator[str]:
    """Yield a warning if a teacher's limit ends packed rows long before the student's.

    limits: maximum row length in tokens for the student and each active teacher.
    """
    rates = statistics.tokens_per_byte
    for i, (limit, rate) in enumerate(zip(limits[1:], rates[1:], strict=True)):
        fitting = round(limit * rates[0] / rate) if rate else limits[0]
        if fitting < _SHORT_ROW * limits[0]:
            settings = config.active_teachers[i]
            if isinstance(settings, CrossTokenizerTeacher) and settings.max_length:
                reason, way_out = f"teachers.{i}.max_length={limit}", f"raise teachers.{i}.max_length"
            else:
                reason = f"the limit of {limit} positions of teachers.{i}.model"
                way_out = "use a teacher that reads longer texts"
            yield (
                f"train.max_length={limits[0]}: {reason} ends packed rows after about {fitting} student tokens, and "
                f"documents are cut there for all models; set train.max_length={fitting}, or {way_out}"
            )


def _low_coverage_advice(config: RunConfig, i: int) -> str:
    settings = config.active_teachers[i]
    context, is_chat = settings.context, config.data.messages_key is not None
    if context is not None and context.replaces_question and is_chat:
        return (
            f"teachers.{i}.context.{'template' if context.key is None else 'key'} has it compare only the answer to "
            "the user's last message, as far as its positions reach; put each answer in its own row, or shorten the "
            "context"
        )
    if isinstance(settings, CrossTokenizerTeacher):
        if settings.max_length is not None:
            return f"teachers.{i}.max_length={settings.max_length} may truncate texts; remove it"
        if is_chat and settings.equal_history != "none":
            return (
                f"teachers.{i}.equal_history={settings.equal_history} excludes tokens after contents that the chat "
                "templates render differently, such as the thinking of earlier turns; set "
                f"teachers.{i}.equal_history=none to include them, or use a chat_template that keeps the contents"
            )
        if is_chat:
            return "the chat templates render different contents, such as thinking; use a chat_template that keeps them"
    if config.term(i).type == "strict":
        return "loss.type=strict compares only tokens that are the same on both sides; p_kl also compares other tokens"
    if context is not None and not isinstance(settings, CrossTokenizerTeacher):
        return f"teachers.{i}.context leaves too few of its positions for responses; shorten it"
    return "nemo-opd projection inspect shows how the tokenizers differ"
