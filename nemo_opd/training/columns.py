"""The columns that a run reads."""

from nemo_opd.config.run import RunConfig
from nemo_opd.data import layout as columns
from nemo_opd.data.prompt_layout import prompt_layout


def layout_of(config: RunConfig) -> columns.Layout:
    """Return the columns of documents, or of prompts where the student samples."""
    layout: columns.Layout = columns.layout_of(config.data)
    if config.rollout is not None:
        answer_key = None if config.reward is None else config.reward.answer_key
        layout = prompt_layout(config.data, answer_key, config.data.response_key)
    if config.routing is not None:
        layout = columns.RoutedLayout(layout, config.routing.key, config.active_names)
    return layout
