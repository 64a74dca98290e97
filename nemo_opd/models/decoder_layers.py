"""The layers of a model, which are sharded, cut, compiled and moved one by one."""

from torch import nn
from transformers import PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers in order; none where the model does not say which they are."""
    names = set(model._no_split_modules or ())
    # FSDP2 makes a layer's class a subclass with another name.
    return [module for module in model.modules() if names & {each.__name__ for each in type(module).__mro__}]
