"""Tensor-parallel plan of a model's modules, from transformers' own plan."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from math import gcd
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from nemo_opd.errors import ModelError


class Style(Enum):
    """Way to cut a module. Unplanned modules are whole on every rank, with the same input there."""

    COLUMNS = auto()
    """Linear layer with a part of the output features, which stay sharded."""
    COLUMNS_GATHERED = auto()
    """Linear layer with a part of the output features, which are gathered."""
    ROWS = auto()
    """Linear layer with a part of the input features, whose input is sharded; the outputs are summed."""
    ROWS_SPLIT = auto()
    """Linear layer with a part of the input features, whose input is whole; the outputs are summed."""
    OF_HEADS = auto()
    """Module that is whole on every rank and computes on each rank's own heads: its gradients are summed."""


_STYLES: dict[str, Style | None] = {
    "colwise": Style.COLUMNS,
    "colwise_gather_output": Style.COLUMNS_GATHERED,
    "colwise_rep": Style.COLUMNS_GATHERED,
    "rowwise": Style.ROWS,
    "rowwise_split_input": Style.ROWS_SPLIT,
    "rowwise_rep": Style.ROWS_SPLIT,
    "replicated_with_grad_allreduce": Style.OF_HEADS,
    "replicated": None,
    "replicate": None,
    # For norms. Where positions are shared follows from the layers' blocks, not from the plan.
    "sequence_parallel": None,
}
"""Styles by transformers' names, including older ones; None: the module is left whole."""
_LINEAR = {Style.COLUMNS, Style.COLUMNS_GATHERED, Style.ROWS, Style.ROWS_SPLIT}
_INTO_BLOCK = {Style.COLUMNS, Style.COLUMNS_GATHERED}
_OUT_OF_BLOCK = {Style.ROWS, Style.ROWS_SPLIT}
_HEAD_NORM = re.compile(r"[qk]_(layer)?norm")
_HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Plan by names of modules, without embedding and head, which are always cut along the vocabulary."""

    styles: dict[str, Style]
    layers: tuple[str, ...]
    """Decoder layers in order."""
    blocks: tuple[str, ...]
    """Parts of layers with whole hidden states as input and a sum over ranks as output: attention, feed-forward."""


def tensor_plan(model: PreTrainedModel, tp: int, *, sequence_parallel: bool, key: str) -> TensorPlan:
    """Return the plan. Raises ModelError, naming `key` and the size, for a model that cannot be cut into `tp` parts."""
    named = dict(model.named_modules())
    if getattr(model.config, "quantization_config", None) is not None:
        raise ModelError(f"{key}={tp}: quantised weights cannot be cut; set it to 1, or name an unquantised model")
    styles = _styles(model, named, f"{key}={tp}")
    layers = [name for name, module in named.items() if type(module).__name__ in set(model._no_split_modules or ())]
    layers = [layer for layer in layers if any(inside(name, layer) for name in styles)]
    blocks = {
        f"{layer}.{name.removeprefix(layer + '.').split('.')[0]}"
        for layer in layers
        for name, style in styles.items()
        if style in _INTO_BLOCK and inside(name, layer) and name.count(".") > layer.count(".") + 1
    }
    plan = TensorPlan(styles, tuple(layers), tuple(sorted(blocks)))
    _check_sizes(model, named, styles, tp, key)
    _check_blocks(named, plan, sequence_parallel, f"{key}={tp}")
    return plan


def inside(name: str, module: str) -> bool:
    """Return whether `name` is a part of `module`."""
    return name.startswith(f"{module}.")


def _styles(model: PreTrainedModel, named: dict[str, nn.Module], value: str) -> dict[str, Style]:
    vocabulary = (model.get_input_embeddings(), model.get_output_embeddings())
    parameters = [name for name, _ in model.named_parameters()]
    planned: dict[str, str] = {}
    for pattern, style in (model._tp_plan or {}).items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        planned |= {name: style for name in (*named, *parameters) if expression.fullmatch(name)}
    planned = {name: style for name, style in planned.items() if named.get(name) not in vocabulary}
    if unknown := next(((name, style) for name, style in planned.items() if style not in _STYLES), None):
        raise ModelError(
            f"{value}: transformers cuts {unknown[0]} of {type(model).__name__} in the way '{unknown[1]}', which is "
            "not supported; set it to 1"
        )
    styles = {name: kind for name, style in planned.items() if (kind := _STYLES[style]) is not None}
    styles |= dict.fromkeys(_norms_of_heads(named, styles), Style.OF_HEADS)
    if not _LINEAR & set(styles.values()):
        raise ModelError(f"{value}: transformers has no tensor-parallel plan for {type(model).__name__}; set it to 1")
    return styles


def _norms_of_heads(named: dict[str, nn.Module], styles: dict[str, Style]) -> Iterator[str]:
    """Yield norms of queries and keys that the plan does not name, as older plans and that of Phi do not."""
    for name in named:
        parent, _, own = name.rpartition(".")
        if _HEAD_NORM.fullmatch(own) and name not in styles and styles.get(f"{parent}.q_proj") is Style.COLUMNS:
            yield name


def _check_sizes(
    model: PreTrainedModel, named: dict[str, nn.Module], styles: dict[str, Style], tp: int, key: str
) -> None:
    sizes = dict(_sizes(model, named, styles))
    if wrong := next((name for name, size in sizes.items() if size % tp), None):
        common = gcd(*sizes.values())
        possible = ", ".join(str(each) for each in range(1, common + 1) if common % each == 0)
        raise ModelError(
            f"{key}={tp}: {wrong}={sizes[wrong]} of {type(model).__name__} cannot be cut into {tp} equal parts; "
            f"set it to one of: {possible}"
        )


def _sizes(model: PreTrainedModel, named: dict[str, nn.Module], styles: dict[str, Style]) -> Iterator[tuple[str, int]]:
    """Yield the sizes that must be cut into equal parts; those that are gathered, and the vocabulary, need not."""
    config: Any = model.config.get_text_config()
    if any(style is Style.COLUMNS and "att" in name.rpartition(".")[0] for name, style in styles.items()):
        yield from ((name, value) for name in _HEAD_COUNTS if isinstance(value := getattr(config, name, None), int))
    for name, style in styles.items():
        linear: Any = named[name]
        if style is Style.COLUMNS:
            yield f"{name}.out_features", linear.out_features
        elif style is Style.ROWS:
            yield f"{name}.in_features", linear.in_features


def _check_blocks(named: dict[str, nn.Module], plan: TensorPlan, sequence_parallel: bool, value: str) -> None:
    for name, style in plan.styles.items():
        if style in _LINEAR and not isinstance(named[name], nn.Linear):
            raise ModelError(
                f"{value}: {name} is a {type(named[name]).__name__}, not a linear layer, and cannot be cut; set it to 1"
            )
    for block in plan.blocks:
        within = [name for name in named if inside(name, block)]
        unplanned = [name for name in within if isinstance(named[name], nn.Linear) and name not in plan.styles]
        if unplanned:
            raise ModelError(f"{value}: transformers' plan does not say how {unplanned[0]} is cut; set it to 1")
        leaving = [name for name in within if plan.styles.get(name) in _OUT_OF_BLOCK]
        if sequence_parallel and len(leaving) != 1:
            raise ModelError(
                f"{value}: {block} has {len(leaving)} layers whose outputs are summed over ranks, and "
                "sequence_parallel needs one; set sequence_parallel=false"
            )
