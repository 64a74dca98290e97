"""Preflight's warnings about models and data, and errors for impossible runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import compress
from typing import TYPE_CHECKING

from transformers import GenerationConfig

from nemo_opd.alignment import ChatRenderer
from nemo_opd.alignment.chat_render import PIECES, Piece, missing_opening_tag, omitted_pieces
from nemo_opd.alignment.chat_template import (
    ChatTemplate,
    Message,
    Tools,
    learned_messages,
    message_texts,
    plain_messages,
)
from nemo_opd.alignment.templates import TemplateFailure
from nemo_opd.alignment.token_roles import template_roles
from nemo_opd.config.data import HubDataset, LearnedTurns
from nemo_opd.config.model import Student
from nemo_opd.config.objective import GRPOLoss
from nemo_opd.config.run import RunConfig
from nemo_opd.config.sampling_checks import longest_prompt
from nemo_opd.config.teacher import CrossTokenizerTeacher, Teacher
from nemo_opd.data.row_types import Conversation, Document, Routed, read_documents
from nemo_opd.errors import AlignmentError, ConfigError, DataError
from nemo_opd.models.load import load_config
from nemo_opd.preflight.corpus import Corpus
from nemo_opd.preflight.model_info import ModelInfo
from nemo_opd.preflight.survey import GOOD_COVERAGE, DataStatistics, sampled_rows
from nemo_opd.preflight.teachers import template_readers
from nemo_opd.rollout.renderer import encode
from nemo_opd.rollout.transformers_engine import end_ids

if TYPE_CHECKING:
    from nemo_opd.preflight.prompts import Prompts

_CHECKED_CHARACTERS = 100_000
"""Number of leading characters of a text that are searched for special tokens."""
_SHORT_TEACHER = 0.75
"""Warning threshold: share of a full window that a teacher can read."""
_TOOLS = "the tools that can be called"
_LEARNED = {
    "tool calls": "learn to end its turn in place of a call",
    "what the assistant says": "learn to say nothing",
}
"""Piece that a learned message needs → wrong behaviour that the student would learn without it."""
_PlainConversation = tuple[Sequence[Message], Tools]


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
    from nemo_opd.data.source_files import resolve_files

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
    if rows := statistics.rows_without_label:
        label = "token to learn" if not config.data.is_chat else "assistant turn"
        empty = (
            f"{len(rows)} of {num_texts} checked texts of data.train (the first is row {rows[0]}, counted from 0 over "
            f"all files) have no {label}"
        )
        longer = ""
        if not config.packs_documents:
            empty += f" within train.max_length={config.train.max_length}"
            longer = ", or raise train.max_length if they are longer"
            if statistics.whole_lengths:
                longer = f", or raise train.max_length (the longest has {max(statistics.whole_lengths)} tokens)"
        if statistics.is_complete and len(rows) == num_texts:
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


def warn_of_few_texts(config: RunConfig, number: int) -> Iterator[str]:
    """Yield a warning if a batch takes more than all `number` texts, packed rows or prompts."""
    per_step = config.train.global_batch_size // (1 if config.rollout is None else config.rollout.n)
    if number < per_step:
        noun = "texts" if config.rollout is None else "prompts"
        unit, about = ("packed rows", "about ") if config.packs_documents else (noun, "")
        yield (
            f"train.global_batch_size={config.train.global_batch_size}: a step takes {per_step} {unit}, the data "
            f"have {about}{number}, so each step takes them all; lower train.global_batch_size, or give more {noun}"
        )


def warn_of_student_as_teacher(config: RunConfig) -> Iterator[str]:
    """Yield a warning if all teachers are the model that the student starts from, with the same prompts."""
    teachers = config.active_teachers
    if not teachers or isinstance(config.loss, GRPOLoss):  # whose KD is the KL to the start
        return
    start = config.student.reference
    if all(t.weights == "frozen" and t.reference == start and t.context is None for t in teachers):
        yield (
            f"{teachers[0].name}: it is the model that the student starts from, so it teaches nothing new and keeps "
            "the student at its start; name another model, or give it a context"
        )


def warn_of_spelled_tokens(config: RunConfig, data: Corpus, student: ModelInfo) -> Iterator[str]:
    """Yield a warning if texts contain the student's special tokens, like rendered conversations or HTML."""
    if config.data.is_chat or config.data.special_tokens == "text":
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


def warn_of_short_teachers(
    config: RunConfig, teachers: Sequence[ModelInfo], statistics: DataStatistics
) -> Iterator[str]:
    """Yield a warning for each teacher that reads much less of a full window of packed text than the student."""
    student_rate, *rates = statistics.tokens_per_byte
    for i, (settings, info, rate) in enumerate(zip(config.active_teachers, teachers, rates, strict=True)):
        if not isinstance(settings, CrossTokenizerTeacher) or not rate:
            continue
        limit, max_length = info.longest_text(settings), config.train.max_length
        fitting = round(limit * student_rate / rate)
        if fitting < _SHORT_TEACHER * max_length:
            reason, way_out = f"teachers.{i}.max_length={limit}", f"raise teachers.{i}.max_length"
            if not settings.max_length:
                reason = f"the limit of {limit} positions of teachers.{i}.model"
                way_out = "use a teacher that reads longer texts"
            yield (
                f"train.max_length={max_length}: {reason} ends after about {fitting} student tokens, and the "
                f"rest of a longer window is learned without this teacher; set train.max_length={fitting}, or {way_out}"
            )


def _low_coverage_advice(config: RunConfig, i: int) -> str:
    settings = config.active_teachers[i]
    context, is_chat = settings.context, config.data.is_chat
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


def check_templates(
    config: RunConfig, data: Corpus | Prompts, student: ModelInfo, teachers: Sequence[ModelInfo]
) -> Iterator[str]:
    """Check some rows of data.train; yields and raises as `check_conversations`."""
    rows = sampled_rows(len(data.train))
    conversations: list[_PlainConversation]
    are_learned = isinstance(data, Corpus)
    if isinstance(data, Corpus):
        conversations = conversations_of(read_documents(data.train, list(rows)))
    else:
        prompts = data.train.read(rows)
        conversations = [(prompt.content, prompt.tools) for prompt in prompts if not isinstance(prompt.content, str)]
    return check_conversations(config, conversations, student, teachers, key="data.train", are_learned=are_learned)


def conversations_of(documents: Sequence[Document]) -> list[_PlainConversation]:
    """Return the plain messages and the tools of the documents that are conversations."""
    contents = (document.content if isinstance(document, Routed) else document for document in documents)
    conversations = (content for content in contents if isinstance(content, Conversation))
    return [(plain_messages(conversation.messages), conversation.tools) for conversation in conversations]


def check_conversations(
    config: RunConfig,
    conversations: Sequence[_PlainConversation],
    student: ModelInfo,
    teachers: Sequence[ModelInfo],
    *,
    key: str,
    are_learned: bool,
) -> Iterator[str]:
    """Yield a warning for each model and each kind of piece that its chat template leaves out.

    The student's template is also checked for the tokens that begin and end a turn. key: setting that names the data.
    are_learned: whether the student learns the assistant's messages. Raises DataError if it would learn a message
    without its tool calls or its text.
    """
    for section, settings, info in template_readers(config, student, teachers):
        template = ChatTemplate(info.tokenizer, settings.chat_template_kwargs)
        omitted = [omitted_pieces(template, messages, tools) for messages, tools in conversations]
        if section == "student" and are_learned:
            _require_learned_pieces(conversations, omitted, config.data.learned_turns, key)
            yield from _warn_of_empty_answers(conversations, config.data.learned_turns, key)
            yield from _warn_of_opening_tags(template, conversations, key)
            renderer = ChatRenderer(info.tokenizer, template_kwargs=settings.chat_template_kwargs)
            yield from _warn_of_missing_ends(renderer, conversations, key, f"{info.tokenizer.eos_token!r}")
        counts = Counter[str](piece for pieces in omitted for piece in set[str]().union(*pieces))
        counts[_TOOLS] = sum(_shows_no_tools(template, messages, tools) for messages, tools in conversations)
        for piece in (*PIECES, _TOOLS):
            if counts[piece]:
                yield (
                    f"{key}: the chat template of {section} leaves out {piece} in {counts[piece]} of "
                    f"{len(conversations)} conversations checked, so this model does not read it; set "
                    f"{section}.chat_template to a file with a template that writes it, or leave it out of the data"
                )


def _require_learned_pieces(
    conversations: Sequence[_PlainConversation],
    omitted: Sequence[Sequence[Collection[Piece]]],
    turns: LearnedTurns,
    key: str,
) -> None:
    """Raise DataError if the student would learn a message without its tool calls or its text."""
    counts = Counter[str]()  # conversations with a learned message that lacks the piece
    for (messages, _), by_message in zip(conversations, omitted, strict=True):
        is_learned = learned_messages(messages, turns)
        counts.update({piece for pieces in compress(by_message, is_learned) for piece in pieces})
    for piece, consequence in _LEARNED.items():
        if counts[piece]:
            raise DataError(
                f"{key}: the student's chat template leaves out {piece} in {counts[piece]} of {len(conversations)} "
                f"conversations checked, so the student would {consequence}; set student.chat_template to a file "
                "with a template that writes them, leave these rows out, or mark these messages with weight=0"
            )


def _shows_no_tools(template: ChatTemplate, messages: Sequence[Message], tools: Tools) -> bool:
    try:
        return bool(tools) and template.render(messages, tools) == template.render(messages)
    except TemplateFailure:  # making the sample reports it
        return False


def _warn_of_empty_answers(conversations: Sequence[_PlainConversation], turns: LearnedTurns, key: str) -> Iterator[str]:
    learned = (compress(messages, learned_messages(messages, turns)) for messages, _ in conversations)
    number = sum(not all("".join(message_texts(message)).strip() for message in messages) for messages in learned)
    if number:
        yield (
            f"{key}: {number} of {len(conversations)} conversations checked have an assistant message without text, "
            "which teaches the student to give empty answers; leave these rows out, or mark these messages with "
            "weight=0"
        )


def _warn_of_opening_tags(
    template: ChatTemplate, conversations: Sequence[_PlainConversation], key: str
) -> Iterator[str]:
    tags = (missing_opening_tag(template, messages, tools) for messages, tools in conversations)
    for tag, number in Counter(tag for tag in tags if tag is not None).items():
        yield (
            f"{key}: the student's chat template ends the generation prompt with {tag!r}, but in {number} of "
            f"{len(conversations)} conversations checked the assistant's last turn does not begin with it, so "
            "training and generation begin the turn differently; add the thinking to the data, set "
            "student.chat_template to a template without the tag, or switch it off in student.chat_template_kwargs, "
            "such as enable_thinking=false"
        )


def _warn_of_missing_ends(
    renderer: ChatRenderer, conversations: Sequence[_PlainConversation], key: str, eos: str
) -> Iterator[str]:
    """Yield a warning if no token ends the assistant's last turn: the student would not learn to stop."""
    number = sum(_lacks_end(renderer, messages, tools) for messages, tools in conversations)
    if number:
        yield (
            f"{key}: the student's chat template writes no token that ends the assistant's last turn in {number} of "
            f"{len(conversations)} conversations checked, so the student does not learn to stop; set "
            f"student.chat_template to a file with a template that ends the assistant's messages with {eos}"
        )


def _lacks_end(renderer: ChatRenderer, messages: Sequence[Message], tools: Tools) -> bool:
    try:
        turn = renderer.render(messages, tools).turns.get(len(messages) - 1)
    except AlignmentError:  # making the sample reports why the template refuses it
        return False
    return turn is not None and not turn.is_ended
