"""Checks of an evaluation's paths before PyTorch is imported, which takes seconds."""

from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.data.schema import require_suitable
from nemo_opd.evaluation.columns import layout_of
from nemo_opd.models.folder import check_folder, check_tokenizer, read_template
from nemo_opd.rollout.installed import require_installed


def check_inputs(config: EvaluationConfig) -> None:
    """Check that what the settings name is there and of the right form. Raises an OPDError for what is not."""
    check_folder(config.model, key="model")
    if config.tokenizer is not None:
        check_tokenizer(config.tokenizer, key="tokenizer")
    if config.chat_template is not None:
        read_template(config.chat_template, key="chat_template")
    require_installed(config.rollout)
    require_suitable(config.data, layout_of(config), key="data")
