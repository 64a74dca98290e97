"""Preflight's warnings about what chat templates leave out of the conversations, and errors if it would be learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_opd.alignment import ChatRenderer
from nemo_opd.alignment.chat_messages import Message, learned_messages, plain_messages
from nemo_opd.alignment.chat_template import ChatTemplate, Tools
from nemo_opd.alignment.omissions import PIECES, missing_opening_tag, omitted_pieces
from nemo_opd.config.run import RunConfig
from nemo_opd.data.documents import Conversation, Routed, read_documents
from nemo_opd.errors import DataError
from nemo_opd.training.corpus import Corpus
from nemo_opd.training.model_info import ModelInfo
from nemo_opd.training.prompts import Prompts
from nemo_opd.training.survey import sampled_rows
from nemo_opd.training.teacher_plan import template_readers

_Conversations = Sequence[tuple[Sequence[Message], Tools]]
_LEARNED = {
    "tool calls": "learn to end its turn in place of a call",
    "what the assistant says": "learn to say nothing",
}
"""Pieces without which a message cannot be learned, and what the student would do."""


def check_templates(
    config: RunConfig, data: Corpus | Prompts, student: ModelInfo, teachers: Sequence[ModelInfo]
) -> Iterator[str]:
    """Yield a warning for each kind of pieces of conversations that a model's chat template leaves out.

    Some conversations of data.train are looked at. Raises DataError if the student would learn a message without its
    calls or its text.
    """
    conversations = _conversations(data)
    for key, settings, info in template_readers(config, student, teachers):
        template = ChatTemplate(info.tokenizer, settings.chat_template_kwargs)
        is_learned = key == "student" and isinstance(data, Corpus)
        if is_learned:
            yield from _warn_of_opening_tags(template, conversations)
            yield from _warn_of_missing_ends(info, settings.chat_template_kwargs, conversations)
        counts, learned = Counter[str](), Counter[str]()
        for messages, tools in conversations:
            omitted = omitted_pieces(template, messages, tools)
            counts.update(set().union(*omitted))
            if tools and _shows_no_tools(template, messages, tools):
                counts["the tools that can be called (data.tools_key)"] += 1
            if is_learned:
                mask = learned_messages(messages, config.data.learned_turns)
                learned.update({piece for pieces, own in zip(omitted, mask, strict=True) if own for piece in pieces})
        for piece, consequence in _LEARNED.items():
            if learned[piece]:
                raise DataError(
                    f"data.train: the student's chat template leaves out {piece} in {learned[piece]} of "
                    f"{len(conversations)} conversations that were looked at, so the student would {consequence}; name "
                    "a file with a template that writes them as student.chat_template, leave these rows out, or mark "
                    "these messages with weight=0"
                )
        for piece in (*PIECES, *(counts.keys() - set(PIECES))):
            if counts[piece]:
                yield (
                    f"data.train: the chat template of {key} leaves out {piece} in {counts[piece]} of "
                    f"{len(conversations)} conversations that were looked at, so this model does not read it; name a "
                    f"file with a template that writes it as {key}.chat_template, or leave it out of the data"
                )


def _conversations(data: Corpus | Prompts) -> _Conversations:
    rows = sampled_rows(len(data.train))
    if isinstance(data, Prompts):
        prompts = data.train.read(rows)
        return [(prompt.content, prompt.tools) for prompt in prompts if not isinstance(prompt.content, str)]
    documents = (each.content if isinstance(each, Routed) else each for each in read_documents(data.train, list(rows)))
    return [(plain_messages(each.messages), each.tools) for each in documents if isinstance(each, Conversation)]


def _shows_no_tools(template: ChatTemplate, messages: Sequence[Message], tools: Tools) -> bool:
    try:
        return template.render(messages, tools) == template.render(messages)
    except Exception:  # a template is a program; making the sample tells why it refuses
        return False


def _warn_of_opening_tags(template: ChatTemplate, conversations: _Conversations) -> Iterator[str]:
    tags = [missing_opening_tag(template, messages, tools) for messages, tools in conversations]
    found = Counter(tag for tag in tags if tag is not None)
    for tag, number in found.items():
        yield (
            f"data.train: the student's chat template ends the generation prompt with {tag!r}, and in {number} of "
            f"{len(conversations)} conversations that were looked at the assistant's last turn does not begin so: the "
            "student learns another beginning than it is asked to continue; add the thinking to the data, or name a "
            "template without it as student.chat_template, or a variable that switches it off in "
            "student.chat_template_kwargs, such as enable_thinking=false"
        )


def _warn_of_missing_ends(
    info: ModelInfo, template_kwargs: Mapping[str, Any], conversations: _Conversations
) -> Iterator[str]:
    """Yield a warning if no token ends the assistant's last turn, so that the student does not learn to stop."""
    renderer = ChatRenderer(info.tokenizer, template_kwargs=template_kwargs)
    last_turns = [
        renderer.render(messages, tools).turns.get(len(messages) - 1)
        for messages, tools in conversations
        if messages[-1]["role"] == "assistant"
    ]
    if number := sum(turn is not None and not turn.is_ended for turn in last_turns):
        yield (
            "data.train: the student's chat template writes no token that ends the assistant's last turn in "
            f"{number} of {len(conversations)} conversations that were looked at, so the student does not learn to stop; "
            "name a file with a template that ends the assistant's messages with "
            f"{info.tokenizer.eos_token!r} as student.chat_template"
        )
