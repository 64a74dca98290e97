"""Tensor-parallel plan of a model's modules, from transformers' own plan."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import gcd
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from nemo_opd.errors import ModelError
from nemo_opd.models.decoder_layers import decoder_layers
from nemo_opd.models.quantised import stays_quantised


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
_ROUTER = re.compile(r"(\w+_)?(gate|router)")
_PART_OF_THE_EXPERTS = "grouped_gemm"
"""transformers' name, in plans for expert parallelism, of a parameter of which a rank has that of some experts."""
_HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Plan by names of modules, without embedding and head, which are always cut along the vocabulary."""

    styles: dict[str, Style]
    layers: tuple[str, ...]
    """Decoder layers in order."""
    blocks: tuple[str, ...]
    """Parts of layers with whole hidden states as input and a sum over ranks as output: attention, feed-forward."""
    experts: tuple[str, ...] = ()
    """Modules with the weights of all experts of a layer, of which each rank has some whole."""
    mixtures: tuple[str, ...] = ()
    """Parts of layers, not among `blocks`, with experts and the router that sends tokens to them."""


def tensor_plan(model: PreTrainedModel, tp: int, *, sequence_parallel: bool, key: str) -> TensorPlan:
    """Return the plan. Raises ModelError, naming `key` and the size, for a model that cannot be cut into `tp` parts."""
    named = dict(model.named_modules())
    if (method := stays_quantised(model.config)) is not None:
        raise ModelError(
            f"{key}={tp}: quantised weights ({method}) cannot be cut; set it to 1, or name an unquantised model"
        )
    experts = _experts(model)
    styles = _styles(model, named, experts, f"{key}={tp}")
    found = set(decoder_layers(model))
    layers = [name for name, module in named.items() if module in found]
    layers = [layer for layer in layers if any(inside(name, layer) for name in (*styles, *experts))]
    mixtures = _parts_of_layers(layers, experts)
    blocks = _parts_of_layers(layers, [name for name, style in styles.items() if style in _INTO_BLOCK]) - mixtures
    plan = TensorPlan(styles, tuple(layers), tuple(sorted(blocks)), experts, tuple(sorted(mixtures)))
    _check_sizes(model, named, plan, tp, key)
    _check_blocks(named, plan, sequence_parallel, f"{key}={tp}")
    return plan


def tensor_parts(model: PreTrainedModel) -> int:
    """Return the largest number of ranks that can share a model, which every possible `tp` divides; 1 for a model that
    cannot be cut.
    """
    try:
        plan = tensor_plan(model, 1, sequence_parallel=False, key="tp")
    except ModelError:
        return 1
    return gcd(*(size for _, size in _sizes(model, dict(model.named_modules()), plan)))


def inside(name: str, module: str) -> bool:
    """Return whether `name` is a part of `module`."""
    return name.startswith(f"{module}.")


def _parts_of_layers(layers: Sequence[str], names: Sequence[str]) -> set[str]:
    """Return the children of layers that have these modules inside."""
    return {
        f"{layer}.{name.removeprefix(layer + '.').split('.')[0]}"
        for layer in layers
        for name in names
        if inside(name, layer) and name.count(".") > layer.count(".") + 1
    }


def _experts(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the modules that transformers' plan for expert parallelism cuts, each into whole experts."""
    parameters = [name for name, _ in model.named_parameters()]
    planned = _matched(getattr(model, "_ep_plan", None) or {}, parameters)
    found = (name.rpartition(".")[0] for name, style in planned.items() if style == _PART_OF_THE_EXPERTS)
    return tuple(dict.fromkeys(found))


def _matched(plan: dict[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the style of each name that a pattern of the plan matches."""
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
    planned = _matched(model._tp_plan or {}, (*named, *parameters))
    planned = {name: style for name, style in planned.items() if named.get(name) not in vocabulary}
    of_experts = {name for name in planned for each in experts if name == each or inside(name, each)}
    planned = {name: style for name, style in planned.items() if name not in of_experts}
    if unknown := next(((name, style) for name, style in planned.items() if style not in _STYLES), None):
        raise ModelError(
            f"{value}: transformers cuts {unknown[0]} of {type(model).__name__} in the way '{unknown[1]}', which is "
            "not supported; set it to 1"
        )
    styles = {name: kind for name, style in planned.items() if (kind := _STYLES[style]) is not None}
    styles |= dict.fromkeys(_norms_of_heads(named, styles), Style.OF_HEADS)
    if not experts and not _LINEAR & set(styles.values()):
        raise ModelError(f"{value}: transformers has no tensor-parallel plan for {type(model).__name__}; set it to 1")
    return styles


def _norms_of_heads(named: dict[str, nn.Module], styles: dict[str, Style]) -> Iterator[str]:
    """Yield norms of queries and keys that the plan does not name, as older plans and that of Phi do not."""
    for name in named:
        parent, _, own = name.rpartition(".")
        if _HEAD_NORM.fullmatch(own) and name not in styles and styles.get(f"{parent}.q_proj") is Style.COLUMNS:
            yield name


def _check_sizes(model: PreTrainedModel, named: dict[str, nn.Module], plan: TensorPlan, tp: int, key: str) -> None:
    sizes = dict(_sizes(model, named, plan))
    if wrong := next((name for name, size in sizes.items() if size % tp), None):
        common = gcd(*sizes.values())
        possible = ", ".join(str(each) for each in range(1, common + 1) if common % each == 0)
        raise ModelError(
            f"{key}={tp}: {wrong}={sizes[wrong]} of {type(model).__name__} cannot be cut into {tp} equal parts; "
            f"set it to one of: {possible}"
        )


def _sizes(model: PreTrainedModel, named: dict[str, nn.Module], plan: TensorPlan) -> Iterator[tuple[str, int]]:
    """Yield the sizes that must be cut into equal parts; those that are gathered, and the vocabulary, need not."""
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
            if isinstance(module, nn.Linear) and inside(name, layer) and not any(inside(name, each) for each in cut):
                raise ModelError(
                    f"{value}: transformers' plan leaves {name} whole, which needs all positions; set "
                    "sequence_parallel=false"
                )
