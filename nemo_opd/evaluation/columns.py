"""The columns that an evaluation reads."""

from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.data.layout import ChatLayout, TextLayout
from nemo_opd.data.prompt_layout import PromptLayout


def layout_of(config: EvaluationConfig) -> PromptLayout:
    """Return the columns of questions and of what the reward compares answers with."""
    data = config.data
    chat = None if data.messages_key is None else ChatLayout(data.messages_key, data.tools_key)
    return PromptLayout(chat or TextLayout(data.text_key), config.reward.answer_key)
