"""A model's decoder layers, the units of sharding, compilation and offload."""

from torch import nn
from transformers import PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers in order; an empty list if the model does not declare them."""
    names = set(model._no_split_modules or ())
    # FSDP2 changes a layer's class to a subclass with another name.
    return [module for module in model.modules() if names & {base.__name__ for base in type(module).__mro__}]
