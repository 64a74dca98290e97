"""How transformers would cut each module of a model over the ranks of a tensor-parallel group."""

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
    """What becomes of a module. Unplanned ones are whole on every rank, and see the same there."""

    COLUMNS = auto()
    """A linear layer with a part of the output features, which stay apart."""
    COLUMNS_GATHERED = auto()
    """The same, but its output is made whole."""
    ROWS = auto()
    """A linear layer with a part of the input features, which come apart; the outputs are summed."""
    ROWS_SPLIT = auto()
    """The same, but its input comes whole."""
    OF_HEADS = auto()
    """Whole on every rank, and sees each rank's own heads there: its gradients are summed."""


STYLES: dict[str, Style | None] = {
    "colwise": Style.COLUMNS,
    "colwise_gather_output": Style.COLUMNS_GATHERED,
    "colwise_rep": Style.COLUMNS_GATHERED,
    "rowwise": Style.ROWS,
    "rowwise_split_input": Style.ROWS_SPLIT,
    "rowwise_rep": Style.ROWS_SPLIT,
    "replicated_with_grad_allreduce": Style.OF_HEADS,
    "replicated": None,
    "replicate": None,
    # Of norms. Where positions are shared follows from where the layers' blocks are, not from the plan.
    "sequence_parallel": None,
}
"""By transformers' names, older ones included."""
LINEAR = {Style.COLUMNS, Style.COLUMNS_GATHERED, Style.ROWS, Style.ROWS_SPLIT}
INTO_BLOCK = {Style.COLUMNS, Style.COLUMNS_GATHERED}
OUT_OF_BLOCK = {Style.ROWS, Style.ROWS_SPLIT}
HEAD_NORM = re.compile(r"[qk]_(layer)?norm")
HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """By names of modules. The vocabulary's two, embedding and head, are not in it: they are always cut."""

    styles: dict[str, Style]
    layers: tuple[str, ...]
    """Decoder layers in their order."""
    blocks: tuple[str, ...]
    """Parts of layers that whole hidden states enter, and a sum over ranks leaves: attention, feed-forward."""


def tensor_plan(model: PreTrainedModel, tp: int, *, sequence_parallel: bool, key: str) -> TensorPlan:
    """Raises ModelError, naming `key`, for a model that cannot be cut into `tp` parts; it says which number is why."""
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
        if style in INTO_BLOCK and inside(name, layer) and name.count(".") > layer.count(".") + 1
    }
    plan = TensorPlan(styles, tuple(layers), tuple(sorted(blocks)))
    _check_sizes(model, named, styles, tp, key)
    _check_blocks(named, plan, sequence_parallel, f"{key}={tp}")
    return plan


def inside(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def _styles(model: PreTrainedModel, named: dict[str, nn.Module], value: str) -> dict[str, Style]:
    vocabulary = (model.get_input_embeddings(), model.get_output_embeddings())
    parameters = [name for name, _ in model.named_parameters()]
    planned: dict[str, str] = {}
    for pattern, style in (model._tp_plan or {}).items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        planned |= {name: style for name in (*named, *parameters) if expression.fullmatch(name)}
    planned = {name: style for name, style in planned.items() if named.get(name) not in vocabulary}
    if unknown := next(((name, style) for name, style in planned.items() if style not in STYLES), None):
        raise ModelError(
            f"{value}: transformers cuts {unknown[0]} of {type(model).__name__} in the way '{unknown[1]}', which is "
            "not supported; set it to 1"
        )
    styles = {name: kind for name, style in planned.items() if (kind := STYLES[style]) is not None}
    styles |= dict.fromkeys(_norms_of_heads(named, styles), Style.OF_HEADS)
    if not LINEAR & set(styles.values()):
        raise ModelError(f"{value}: transformers has no tensor-parallel plan for {type(model).__name__}; set it to 1")
    return styles


def _norms_of_heads(named: dict[str, nn.Module], styles: dict[str, Style]) -> Iterator[str]:
    """Norms of queries and keys that the plan does not name, as older plans and that of Phi do not."""
    for name in named:
        parent, _, own = name.rpartition(".")
        if HEAD_NORM.fullmatch(own) and name not in styles and styles.get(f"{parent}.q_proj") is Style.COLUMNS:
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
            f"what would do: {possible}"
        )


def _sizes(model: PreTrainedModel, named: dict[str, nn.Module], styles: dict[str, Style]) -> Iterator[tuple[str, int]]:
    """All that must be cut into equal parts; sizes that are gathered, and the vocabulary's, need not be."""
    config: Any = model.config.get_text_config()
    if any(style is Style.COLUMNS and "att" in name.rpartition(".")[0] for name, style in styles.items()):
        yield from ((name, value) for name in HEAD_COUNTS if isinstance(value := getattr(config, name, None), int))
    for name, style in styles.items():
        linear: Any = named[name]
        if style is Style.COLUMNS:
            yield f"{name}.out_features", linear.out_features
        elif style is Style.ROWS:
            yield f"{name}.in_features", linear.in_features


def _check_blocks(named: dict[str, nn.Module], plan: TensorPlan, sequence_parallel: bool, value: str) -> None:
    for name, style in plan.styles.items():
        if style in LINEAR and not isinstance(named[name], nn.Linear):
            raise ModelError(
                f"{value}: {name} is a {type(named[name]).__name__}, not a linear layer, and cannot be cut; set it to 1"
            )
    for block in plan.blocks:
        within = [name for name in named if inside(name, block)]
        unplanned = [name for name in within if isinstance(named[name], nn.Linear) and name not in plan.styles]
        if unplanned:
            raise ModelError(f"{value}: transformers' plan does not say how {unplanned[0]} is cut; set it to 1")
        leaving = [name for name in within if plan.styles.get(name) in OUT_OF_BLOCK]
        if sequence_parallel and len(leaving) != 1:
            raise ModelError(
                f"{value}: {block} has {len(leaving)} layers whose outputs are summed over ranks, and "
                "sequence_parallel needs one; set sequence_parallel=false"
            )
