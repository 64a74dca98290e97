"""Tensor-parallel plan of a model's modules, derived from transformers' plan."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import gcd
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from nemo_opd.errors import ModelError
from nemo_opd.models.quantised import stays_quantised


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers in order; an empty list if the model does not declare them."""
    names = set(model._no_split_modules or ())
    # FSDP2 changes a layer's class to a subclass with another name.
    return [module for module in model.modules() if names & {base.__name__ for base in type(module).__mro__}]


class Style(Enum):
    """Way to shard a module. Modules without a style are replicated, with the same input on every rank."""

    COLUMNS = auto()
    """Linear layer with sharded output features, which stay sharded."""
    COLUMNS_GATHERED = auto()
    """Linear layer with sharded output features, which are gathered."""
    ROWS = auto()
    """Linear layer with sharded input features and a sharded input; outputs are summed."""
    ROWS_SPLIT = auto()
    """Linear layer with sharded input features and a replicated input; outputs are summed."""
    PER_HEAD = auto()
    """Replicated module that computes on each rank's heads: its gradients are summed."""


_STYLES: dict[str, Style | None] = {
    "colwise": Style.COLUMNS,
    "colwise_gather_output": Style.COLUMNS_GATHERED,
    "colwise_rep": Style.COLUMNS_GATHERED,
    "rowwise": Style.ROWS,
    "rowwise_split_input": Style.ROWS_SPLIT,
    "rowwise_rep": Style.ROWS_SPLIT,
    "replicated_with_grad_allreduce": Style.PER_HEAD,
    "replicated": None,
    "replicate": None,
    # For norms. Positions are sharded according to the layers' blocks, not the plan.
    "sequence_parallel": None,
}
"""Styles keyed by transformers' names, including older names. Modules with None are replicated."""
_LINEAR = {Style.COLUMNS, Style.COLUMNS_GATHERED, Style.ROWS, Style.ROWS_SPLIT}
_INTO_BLOCK = {Style.COLUMNS, Style.COLUMNS_GATHERED}
_OUT_OF_BLOCK = {Style.ROWS, Style.ROWS_SPLIT}
_HEAD_NORM = re.compile(r"[qk]_(layer)?norm")
_ROUTER = re.compile(r"(\w+_)?(gate|router)")
_SHARDED_BY_EXPERT = "grouped_gemm"
"""transformers' name, in plans for expert parallelism, of the style that gives each rank some of the experts."""
_HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Plan in terms of module names, without embedding and head, which are always sharded along the vocabulary."""

    styles: dict[str, Style]
    layers: tuple[str, ...]
    """Decoder layers in order."""
    blocks: tuple[str, ...]
    """Parts of layers that take replicated hidden states and output a sum over ranks: attention, feed-forward."""
    experts: tuple[str, ...] = ()
    """Modules with the weights of all experts of a layer; each rank gets some complete experts."""
    mixtures: tuple[str, ...] = ()
    """Parts of layers, not in `blocks`, with experts and the router that sends tokens to them."""


def tensor_plan(model: PreTrainedModel, tp: int, *, sequence_parallel: bool, key: str) -> TensorPlan:
    """Return the plan. Raises ModelError, naming `key` and `tp`, for a model that cannot be cut into `tp` parts."""
    named = dict(model.named_modules())
    if (method := stays_quantised(model.config)) is not None:
        raise ModelError(
            f"{key}={tp}: quantised weights ({method}) cannot be cut; set it to 1, or name an unquantised model"
        )
    experts = _experts(model)
    styles = _styles(model, named, experts, f"{key}={tp}")
    layer_modules = set(decoder_layers(model))
    layers = [name for name, module in named.items() if module in layer_modules]
    layers = [layer for layer in layers if any(inside(name, layer) for name in (*styles, *experts))]
    mixtures = _parts_of_layers(layers, experts)
    blocks = _parts_of_layers(layers, [name for name, style in styles.items() if style in _INTO_BLOCK]) - mixtures
    plan = TensorPlan(styles, tuple(layers), tuple(sorted(blocks)), experts, tuple(sorted(mixtures)))
    _check_sizes(model, named, plan, tp, key)
    _check_blocks(named, plan, sequence_parallel, f"{key}={tp}")
    return plan


def inside(name: str, module: str) -> bool:
    """Return whether the module `name` is inside `module`."""
    return name.startswith(f"{module}.")


def _parts_of_layers(layers: Sequence[str], names: Sequence[str]) -> set[str]:
    """Return the children of layers that contain these modules."""
    return {
        f"{layer}.{name.removeprefix(layer + '.').split('.')[0]}"
        for layer in layers
        for name in names
        if inside(name, layer) and name.count(".") > layer.count(".") + 1
    }


def _experts(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the modules that transformers' plan for expert parallelism shards by expert."""
    parameters = [name for name, _ in model.named_parameters()]
    planned = _matched(getattr(model, "_ep_plan", None) or {}, parameters)
    modules = (name.rpartition(".")[0] for name, style in planned.items() if style == _SHARDED_BY_EXPERT)
    return tuple(dict.fromkeys(modules))


def _matched(plan: dict[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the planned style of each name that matches a pattern."""
    matched: dict[str, str] = {}
    names = list(names)
    for pattern, style in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        matched |= {name: style for name in names if expression.fullmatch(name)}
    return matched


def _styles(
    model: PreTrainedModel, named: dict[str, nn.Module], experts: tuple[str, ...], value: str
) -> dict[str, Style]:
    vocabulary = (model.get_input_embeddings(), model.get_output_embeddings())
    parameters = [name for name, _ in model.named_parameters()]
    planned = _matched(model.tp_plan or {}, (*named, *parameters))
    planned = {name: style for name, style in planned.items() if named.get(name) not in vocabulary}
    in_experts = {name for name in planned for module in experts if name == module or inside(name, module)}
    planned = {name: style for name, style in planned.items() if name not in in_experts}
    if unknown := next(((name, style) for name, style in planned.items() if style not in _STYLES), None):
        raise ModelError(
            f"{value}: transformers cuts {unknown[0]} of {type(model).__name__} in the way '{unknown[1]}', which is "
            "not supported; set it to 1"
        )
    styles = {name: kind for name, style in planned.items() if (kind := _STYLES[style]) is not None}
    styles |= dict.fromkeys(_norms_of_heads(named, styles), Style.PER_HEAD)
    if not experts and not _LINEAR & set(styles.values()):
        raise ModelError(f"{value}: transformers has no tensor-parallel plan for {type(model).__name__}; set it to 1")
    return styles


def _norms_of_heads(named: dict[str, nn.Module], styles: dict[str, Style]) -> Iterator[str]:
    """Yield norms of queries and keys that the plan omits, as older plans and Phi's do."""
    for name in named:
        parent, _, attribute = name.rpartition(".")
        if _HEAD_NORM.fullmatch(attribute) and name not in styles and styles.get(f"{parent}.q_proj") is Style.COLUMNS:
            yield name


def _check_sizes(model: PreTrainedModel, named: dict[str, nn.Module], plan: TensorPlan, tp: int, key: str) -> None:
    sizes = dict(_sizes(model, named, plan))
    if wrong := next((name for name, size in sizes.items() if size % tp), None):
        common = gcd(*sizes.values())
        possible = ", ".join(str(parts) for parts in range(1, common + 1) if common % parts == 0)
        raise ModelError(
            f"{key}={tp}: {wrong}={sizes[wrong]} of {type(model).__name__} cannot be cut into {tp} equal parts; "
            f"set it to one of: {possible}"
        )


def _sizes(model: PreTrainedModel, named: dict[str, nn.Module], plan: TensorPlan) -> Iterator[tuple[str, int]]:
    """Yield name and value of sizes that must be divisible by `tp`: not gathered features or the vocabulary."""
    config: Any = model.config.get_text_config()
    if any(style is Style.COLUMNS and "att" in name.rpartition(".")[0] for name, style in plan.styles.items()):
        yield from ((name, value) for name in _HEAD_COUNTS if isinstance(value := getattr(config, name, None), int))
    yield from ((f"experts of {name}", len(next(named[name].parameters()))) for name in plan.experts)
    for name, style in plan.styles.items():
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
    for block in (*plan.blocks, *plan.mixtures):
        within = [name for name in named if inside(name, block)]
        unplanned = [name for name in within if isinstance(named[name], nn.Linear) and name not in plan.styles]
        if block in plan.mixtures:
            unplanned = [name for name in unplanned if not _ROUTER.fullmatch(name.rpartition(".")[2])]
        if unplanned:
            raise ModelError(f"{value}: transformers' plan does not say how {unplanned[0]} is cut; set it to 1")
        leaving = [name for name in within if plan.styles.get(name) in _OUT_OF_BLOCK]
        if block in plan.mixtures:
            _check_mixture(named, plan, block, value)
        elif sequence_parallel and len(leaving) != 1:
            raise ModelError(
                f"{value}: {block} has {len(leaving)} layers whose outputs are summed over ranks, and "
                "sequence_parallel needs one; set sequence_parallel=false"
            )
    if sequence_parallel:
        _check_positions(named, plan, value)


def _check_mixture(named: dict[str, nn.Module], plan: TensorPlan, mixture: str, value: str) -> None:
    experts = next(named[name] for name in plan.experts if inside(name, mixture))
    if not hasattr(experts, "_is_expert_parallel"):
        raise ModelError(
            f"{value}: {type(experts).__name__} of this version of transformers computes all experts or none; install "
            "a newer one, or set it to 1"
        )
    for name, style in plan.styles.items():
        linear: Any = named[name]
        is_summed = style is Style.ROWS and linear.bias is None
        if inside(name, mixture) and style in _LINEAR and style is not Style.COLUMNS and not is_summed:
            raise ModelError(
                f"{value}: {name} is cut in a way that is not supported together with experts; set it to 1"
            )


def _check_positions(named: dict[str, nn.Module], plan: TensorPlan, value: str) -> None:
    """Raise ModelError for a part of a layer that is left whole and mixes positions."""
    cut = (*plan.blocks, *plan.mixtures)
    for layer in plan.layers:
        for name, module in named.items():
            if isinstance(module, nn.Linear) and inside(name, layer) and not any(inside(name, block) for block in cut):
                raise ModelError(
                    f"{value}: transformers' plan leaves {name} whole, which needs all positions; set "
                    "sequence_parallel=false"
                )
