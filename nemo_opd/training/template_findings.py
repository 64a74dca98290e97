"""Warnings about pieces of conversations that chat templates leave out; errors if the student would learn to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import compress

from nemo_opd.alignment import ChatRenderer
from nemo_opd.alignment.chat_messages import Message, learned_messages, plain_messages
from nemo_opd.alignment.chat_template import ChatTemplate, Tools
from nemo_opd.alignment.omissions import PIECES, Piece, missing_opening_tag, omitted_pieces
from nemo_opd.config.data import LearnedTurns
from nemo_opd.config.run import RunConfig
from nemo_opd.data.documents import Conversation, Document, Routed, read_documents
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.training.corpus import Corpus
from nemo_opd.training.model_info import ModelInfo
from nemo_opd.training.prompts import Prompts
from nemo_opd.training.survey import sampled_rows
from nemo_opd.training.teacher_plan import template_readers

PlainConversation = tuple[Sequence[Message], Tools]
_TOOLS = "the tools that can be called"
_LEARNED = {
    "tool calls": "learn to end its turn in place of a call",
    "what the assistant says": "learn to say nothing",
}
"""Piece that a learned message needs → wrong behaviour that the student would learn without it."""


def check_templates(
    config: RunConfig, data: Corpus | Prompts, student: ModelInfo, teachers: Sequence[ModelInfo]
) -> Iterator[str]:
    """Check some rows of data.train; yields and raises as `check_conversations`."""
    rows = sampled_rows(len(data.train))
    conversations: list[PlainConversation]
    if isinstance(data, Prompts):
        prompts = data.train.read(rows)
        conversations = [(prompt.content, prompt.tools) for prompt in prompts if not isinstance(prompt.content, str)]
    else:
        conversations = conversations_of(read_documents(data.train, list(rows)))
    are_learned = not isinstance(data, Prompts)
    return check_conversations(config, conversations, student, teachers, key="data.train", are_learned=are_learned)


def conversations_of(documents: Sequence[Document]) -> list[PlainConversation]:
    """Return the plain messages and the tools of the documents that are conversations."""
    contents = (document.content if isinstance(document, Routed) else document for document in documents)
    conversations = (content for content in contents if isinstance(content, Conversation))
    return [(plain_messages(conversation.messages), conversation.tools) for conversation in conversations]


def check_conversations(
    config: RunConfig,
    conversations: Sequence[PlainConversation],
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
    conversations: Sequence[PlainConversation],
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
    except Exception:  # a template is a program; making the sample reports its error
        return False


def _warn_of_opening_tags(
    template: ChatTemplate, conversations: Sequence[PlainConversation], key: str
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
    renderer: ChatRenderer, conversations: Sequence[PlainConversation], key: str, eos: str
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
