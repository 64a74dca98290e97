"""A student that has learned a conversation ends its turns by itself, with each kind of chat template."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from nemo_opd.alignment import ChatRenderer
from nemo_opd.data.row_types import Prompt
from nemo_opd.rollout.conversation import ConversationRenderer
from nemo_opd.rollout.engine_interface import BatchLimit, Request, Sampling
from nemo_opd.rollout.transformers_engine import Sampler, end_ids
from tests.alignment.chat_fixture import with_template
from tests.alignment.chat_templates import PLAIN, TEMPLATES, TOOL, chat_tokenizer


def learned(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> LlamaForCausalLM:
    """Return a model that has memorized the conversation's tokens in the mask."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    chat = ChatRenderer(tokenizer)(messages)
    ids, mask = torch.from_numpy(chat.ids).long()[None], torch.from_numpy(chat.assistant_mask)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(200):
        logits = model(input_ids=ids).logits[:, :-1][mask[:, 1:]]
        loss = F.cross_entropy(logits, ids[:, 1:][mask[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.02:
            return model.eval()
    raise AssertionError(f"the conversation was not learned: {loss}")


def sampled(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], k: int) -> tuple[str, str]:
    """Return the model's message k and its finish reason."""
    sampler = Sampler(
        learned(tokenizer, messages),
        end_ids=end_ids(tokenizer),
        vocab_size=len(tokenizer),
        limit=BatchLimit(1),
        device="cpu",
    )
    ids = ConversationRenderer(tokenizer).prompt_ids(Prompt(0, messages[:k]))
    (completion,) = sampler.generate([Request(ids, 80, 0)], Sampling(temperature=0))
    return tokenizer.decode(completion.ids), completion.finish_reason


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "no end"])
def test_the_last_turn_ends(name: str) -> None:
    """Bug: an end that follows the answer as text or as two tokens is not learned, so the student goes on."""
    text, reason = sampled(chat_tokenizer(name), PLAIN, len(PLAIN) - 1)
    assert "Answer two." in text
    assert reason == "stop"


def test_a_template_without_an_end_can_be_repaired() -> None:
    """Bug: turns do not end with the template that preflight's warning recommends."""
    tokenizer = chat_tokenizer("no end")
    assert sampled(tokenizer, PLAIN, 3)[1] == "length"
    template = str(tokenizer.chat_template) + "{% if not add_generation_prompt %}</s>{% endif %}"
    assert sampled(with_template(tokenizer, template), PLAIN, 3) == ("Answer two.</s>", "stop")


def test_a_call_is_learned_with_its_name() -> None:
    """Bug: a call's name and opening token are not learned if the template has no generation prompt."""
    text, reason = sampled(chat_tokenizer("no generation prompt"), TOOL, 1)
    assert text == '[TOOL_CALLS]weather[ARGS]{"city": "Bern"}</s>'
    assert reason == "stop"
