"""Columns of questions, and checks of an evaluation's paths before PyTorch is imported, which takes seconds."""

from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.data.layout import ChatLayout, TextLayout
from nemo_opd.data.prompt_layout import PromptLayout
from nemo_opd.data.schema import require_suitable
from nemo_opd.extras import require_extras
from nemo_opd.models.folder import check_folder, check_tokenizer, read_template
from nemo_opd.rollout.installed import require_installed


def check_inputs(config: EvaluationConfig) -> None:
    """Raise an OPDError for a path or a program in the settings that does not exist or has the wrong form."""
    check_folder(config.model, key="model")
    if config.tokenizer is not None:
        check_tokenizer(config.tokenizer, key="tokenizer")
    if config.chat_template is not None:
        read_template(config.chat_template, key="chat_template")
    require_extras(None, config.reward, config.rollout)
    require_installed(config.rollout)
    require_suitable(config.data, layout_of(config), key="data")


def layout_of(config: EvaluationConfig) -> PromptLayout:
    """Return the columns of questions and of the answers that the reward compares with."""
    data = config.data
    chat = None if data.messages_key is None else ChatLayout(data.messages_key, data.tools_key)
    return PromptLayout(chat or TextLayout(data.text_key), config.reward.answer_key)
